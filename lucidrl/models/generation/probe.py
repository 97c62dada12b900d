"""The probe: a fixed text whose log-probabilities policy and generators compare after every refit."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

TEXT = "The quick brown fox counts: 12 + 30 = 42, then 7 * 8 = 56. So the answer is 98, she said; why not 100?"
MOST_TOKENS, FEWEST_TOKENS = 32, 12


def probe_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of the probe: those of a fixed text, or some of the vocabulary if the text has too few.

    They depend on the tokenizer only, so every process of a run has the same probe.
    """
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    known = [token for token in ids if token != tokenizer.unk_token_id][:MOST_TOKENS]
    if len(known) >= FEWEST_TOKENS:
        return known
    size = len(tokenizer)
    return [number * size // FEWEST_TOKENS for number in range(FEWEST_TOKENS)]
