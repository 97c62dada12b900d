"""The embedded model and tokenizer."""

from __future__ import annotations

import string

import pytest
import torch

from lucidrl.models.embedded import WARM_START, embedded_model, embedded_tokenizer
from lucidrl.models.loading import load_model

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


def weights(seed: int = 0, warm: bool = False) -> dict[str, torch.Tensor]:
    return embedded_model(warm=warm, seed=seed, attn_implementation="eager").state_dict()


def test_every_printable_character_survives_the_round_trip(tokenizer):
    for text in (PRINTABLE, PRINTABLE[::-1], "  two  spaces \n\n", "don't , ,stop .", string.digits):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


def test_unknown_characters_are_one_token_each(tokenizer):
    ids = tokenizer("é\t漢x")["input_ids"]
    assert ids == [*[tokenizer.unk_token_id] * 3, tokenizer.convert_tokens_to_ids("x")]


def test_special_tokens_are_distinct_and_whole(tokenizer):
    specials = ["<|pad|>", "<|end|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>"]
    assert tokenizer("".join(specials))["input_ids"] == list(range(len(specials)))


def test_a_prompt_is_a_prefix_of_its_messages(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "12+30="},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "and 1 more?"},
        {"role": "assistant", "content": "43"},
    ]

    def tokens(count: int, add_generation_prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt=add_generation_prompt, return_dict=False
        )

    whole = tokens(5, add_generation_prompt=False)
    for count in (2, 4):
        prompt = tokens(count, add_generation_prompt=True)
        assert prompt == whole[: len(prompt)]
    assert whole[-1] == tokenizer.eos_token_id


def test_the_warm_start_is_small_complete_and_not_random():
    assert WARM_START.stat().st_size < 5_000_000
    warm, untrained = weights(warm=True), weights(warm=False)
    assert all(not torch.equal(warm[name], untrained[name]) for name in warm)
    assert all(value.isfinite().all() for value in warm.values())
    assert torch.equal(warm["lm_head.weight"], warm["model.embed_tokens.weight"])


def test_the_warm_start_does_not_depend_on_the_seed():
    first, second = weights(seed=1, warm=True), weights(seed=2, warm=True)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_untrained_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first = weights(seed=1)
    torch.manual_seed(6)
    again, other = weights(seed=1), weights(seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["embedded", "embedded-untrained"])
def test_making_the_model_does_not_change_the_global_random_state(name):
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    load_model(name, torch.float32, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_tokenizer_and_model_have_the_same_vocabulary():
    model = embedded_model(warm=False, seed=0, attn_implementation="eager")
    tokenizer = embedded_tokenizer()
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
