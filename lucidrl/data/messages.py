"""Token in, token out: messages become token ids, and sampled ids are never tokenised again.

A tokenizer with a chat template renders messages by that template. A tokenizer without a chat template (of a base or
embedded model) encodes the joined contents, with the special tokens that it adds by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from lucidrl.data.chat_template import apply_template
from lucidrl.data.interfaces import KEYS_OF_TOKENS, LLMMessageLogType
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Placeholder for the assistant's text while a template is rendered: the template might change the text.
_SENTINEL = "@@assistant-text@@"


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of the messages, with the generation prompt."""
    _check_awaits_completion(messages)
    if not tokenizer.chat_template:
        return tokenizer.encode(_joined(messages))
    return apply_template(tokenizer, messages, tokenize=True, return_dict=True)["input_ids"]


def render_next_turn(
    tokenizer: PreTrainedTokenizerBase, message_log: LLMMessageLogType, messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Token ids of an environment's messages after an assistant message, with the generation prompt.

    The ids start with the end-of-turn tokens of the assistant message, unless the model has sampled them.
    """
    _check_awaits_completion(messages)
    if not message_log or message_log[-1]["role"] != "assistant":
        raise DataError("a new turn must follow an assistant message; append the completion to the log first")
    if not tokenizer.chat_template:
        return tokenizer.encode(_joined(messages), add_special_tokens=False)
    history, sampled_ids = message_log[:-1], message_log[-1]["token_ids"].tolist()
    if (turn := _text_of_turn(tokenizer, history, message_log[-1])) is not None:
        before = apply_template(tokenizer, message_log, tokenize=False, add_generation_prompt=False)
        whole = apply_template(tokenizer, [*message_log, *messages], tokenize=False)
        if whole.startswith(before):
            rest = turn[_end_of_turn(tokenizer, turn) :]
            return tokenizer.encode(rest + whole.removeprefix(before), add_special_tokens=False)
    _, after = _around_completion(tokenizer, history, messages)
    ids = tokenizer.encode(after, add_special_tokens=False)
    closing = _closing_ids(tokenizer, history)
    ended = bool(closing and sampled_ids) and sampled_ids[-1] in (closing[-1], tokenizer.eos_token_id)
    return ids[len(closing) :] if ended and ids[: len(closing)] == closing else ids


def rewrites_history(
    tokenizer: PreTrainedTokenizerBase, message_log: LLMMessageLogType, messages: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether the chat template writes the log differently once `messages` follow it, for instance without reasoning.

    White space does not count. The tokens of the log are then not those that the template would show to the model.
    """
    if not tokenizer.chat_template:
        return False
    seen = apply_template(tokenizer, message_log[:-1], tokenize=False) + message_log[-1]["content"]
    whole = apply_template(tokenizer, [*message_log, *messages], tokenize=False)
    return not "".join(whole.split()).startswith("".join(seen.split()))


def with_tokens(messages: Sequence[Mapping[str, Any]], token_ids: Sequence[int]) -> LLMMessageLogType:
    """Return the messages with their tokens; `token_ids` are those of all messages, rendered together."""
    lengths = [0] * (len(messages) - 1) + [len(token_ids)]
    parts = torch.tensor(token_ids, dtype=torch.int64).split(lengths)
    return [{**message, "token_ids": part} for message, part in zip(messages, parts, strict=True)]


def sampled_message(
    content: str, token_ids: torch.Tensor, generation_logprobs: torch.Tensor, policy_versions: torch.Tensor
) -> dict[str, Any]:
    """Make the message-log entry of a sampled completion."""
    return {
        "role": "assistant",
        "content": content,
        "token_ids": token_ids,
        "generation_logprobs": generation_logprobs,
        "policy_versions": policy_versions,
    }


def supervised_example(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> LLMMessageLogType:
    """Make the message log of an example; the model learns the tokens of its assistant messages.

    The tokens are the same as in a rollout: `render_prompt` renders the messages before the first assistant message,
    `render_next_turn` renders later ones, and an assistant message ends with the end-of-turn token.
    """
    if not messages or messages[-1]["role"] != "assistant":
        raise DataError("a supervised example must end with an assistant message, which the model learns; append one")
    if not tokenizer.chat_template and any(message.get("tool_calls") for message in messages):
        raise DataError(
            "a message has tool_calls, but the tokenizer has no chat template to write them; use a model with a chat "
            "template, or write the calls into the content"
        )
    log: LLMMessageLogType = []
    turn: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            turn.append(message)
            continue
        ids = render_next_turn(tokenizer, log, turn) if log else render_prompt(tokenizer, turn)
        log += with_tokens(turn, ids)
        log += with_tokens([message], _completion_ids(tokenizer, log, message))
        turn = []
    return log


def flatten_message_log(log: LLMMessageLogType, supervised: bool = False) -> dict[str, torch.Tensor]:
    """Concatenate the messages of a log into one sequence.

    Args:
        supervised: assistant messages come from a dataset, so they have no log-probabilities.

    Returns:
        `input_ids`, `token_mask` (1 on the tokens of assistant messages, which count for the loss) and, unless
        supervised, `generation_logprobs` (0 on tokens that were not sampled).

    Raises:
        DataError: the log has no tokens, or the log-probabilities of a sampled message are missing, not finite or not
            one per token.
    """
    if not sum(len(message["token_ids"]) for message in log):
        raise DataError(f"a message log of {len(log)} messages has no tokens; add the token ids of its prompt first")
    masks, logprobs = [], []
    for index, message in enumerate(log):
        size = len(message["token_ids"])
        counts = message["role"] == "assistant" and size > 0
        masks.append(torch.full((size,), float(counts)))
        if not supervised:
            logprobs.append(_checked_logprobs(index, message) if counts else torch.zeros(size))
    flat = {"input_ids": torch.cat([message["token_ids"] for message in log]), "token_mask": torch.cat(masks)}
    return flat if supervised else {**flat, "generation_logprobs": torch.cat(logprobs)}


def collate(
    logs: Sequence[LLMMessageLogType],
    pad_id: int,
    supervised: bool = False,
    loss_multipliers: Sequence[float] | None = None,
) -> BatchedDataDict:
    """Make a right-padded batch of message logs.

    Columns: `input_ids`, `input_lengths`, `token_mask`, `sample_mask` (the loss multipliers, by default 1) and,
    unless supervised, `generation_logprobs`.
    """
    if not logs:
        raise DataError("a batch needs at least one message log; pass one or more")
    flats = [flatten_message_log(log, supervised) for log in logs]
    multipliers = [1.0] * len(logs) if loss_multipliers is None else loss_multipliers
    if len(multipliers) != len(logs):
        raise DataError(f"{len(multipliers)} loss multipliers for {len(logs)} message logs; give one per log")
    columns = {
        name: pad_sequence(
            [flat[name] for flat in flats], batch_first=True, padding_value=pad_id if name == "input_ids" else 0
        )
        for name in flats[0]
    }
    columns["input_lengths"] = torch.tensor([len(flat["input_ids"]) for flat in flats])
    columns["sample_mask"] = torch.tensor(multipliers, dtype=torch.float32)
    return BatchedDataDict(columns)


def _checked_logprobs(index: int, message: Mapping[str, Any]) -> torch.Tensor:
    size, logprobs = len(message["token_ids"]), message.get("generation_logprobs")
    if logprobs is None:
        raise DataError(
            f"message {index} is a completion of {size} tokens without generation_logprobs; "
            "give one log-probability per token, or set supervised=True for messages of a dataset"
        )
    if logprobs.shape != (size,):
        raise DataError(
            f"message {index} has {size} tokens but generation_logprobs of shape {tuple(logprobs.shape)}; "
            "the generator must return one log-probability per sampled token"
        )
    if not torch.isfinite(logprobs).all():
        raise DataError(
            f"message {index} has generation_logprobs that are not finite; a sampled token has a probability above 0, "
            "so check the generator for overflow"
        )
    return logprobs.float()


def _check_awaits_completion(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise DataError("there are no messages to complete; give at least one")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "the last message has the role assistant; end with a message that the assistant replies to, such as one of "
            "the role user"
        )


def _joined(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(message["content"] for message in messages)


def _completion_ids(
    tokenizer: PreTrainedTokenizerBase, history: LLMMessageLogType, message: Mapping[str, Any]
) -> list[int]:
    eos_id: Any = tokenizer.eos_token_id
    lead, content = "", message["content"]
    closing: list[int] = []
    if tokenizer.chat_template:
        if (turn := _text_of_turn(tokenizer, history, message)) is not None:
            end = _end_of_turn(tokenizer, turn)
            closing = [eos_id] if not end and eos_id is not None else []
            return tokenizer.encode(turn[:end] if end else turn, add_special_tokens=False) + closing
        prompt = apply_template(tokenizer, history, tokenize=False)
        before, _ = _around_completion(tokenizer, history, ())
        # Some templates write text between generation prompt and completion; the model must learn that text too.
        lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
        closing = _closing_ids(tokenizer, history)
    if not closing and eos_id is not None:
        closing = [eos_id]
    return tokenizer.encode(lead + content, add_special_tokens=False) + closing


def _text_of_turn(
    tokenizer: PreTrainedTokenizerBase, history: Sequence[Mapping[str, Any]], message: Mapping[str, Any]
) -> str | None:
    """Text of an assistant message with keys such as `tool_calls`, after the generation prompt.

    Returns:
        None if the template ignores all keys but role and content: the content is then tokenized without the template,
        which might change it.

    Raises:
        DataError: the text does not start with that of the generation prompt.
    """
    plain = {"role": message["role"], "content": message["content"]}
    if not set(message) - {*plain, *KEYS_OF_TOKENS}:
        return None
    text, plain_text = (
        apply_template(tokenizer, [*history, one], tokenize=False, add_generation_prompt=False)
        for one in (message, plain)
    )
    if text == plain_text:
        return None
    prompt = apply_template(tokenizer, history, tokenize=False)
    if not text.startswith(prompt):
        others = ", ".join(sorted(set(message) - {*plain, *KEYS_OF_TOKENS}))
        raise DataError(
            f"the chat template does not write an assistant message with {others} after its generation prompt, so its "
            "tokens are not known; remove these keys, or use another template"
        )
    return text.removeprefix(prompt)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Where the last special token of an assistant message ends; 0 if it has none."""
    markers = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    return max((text.rfind(marker) + len(marker) for marker in markers if marker in text), default=0)


def _closing_ids(tokenizer: PreTrainedTokenizerBase, history: LLMMessageLogType) -> list[int]:
    """Token ids after the text of an assistant message, up to the end-of-turn token; empty if there is none."""
    _, after = _around_completion(tokenizer, history, ())
    ids = tokenizer.encode(after, add_special_tokens=False)
    markers = [tokenizer.eos_token_id, *tokenizer.added_tokens_decoder]
    return next((ids[: end + 1] for end, token in enumerate(ids) if token in markers), [])


def _around_completion(
    tokenizer: PreTrainedTokenizerBase,
    history: Sequence[Mapping[str, Any]],
    following: Sequence[Mapping[str, Any]],
) -> tuple[str, str]:
    """Render an assistant message between `history` and `following`; return the text before and the text after it."""
    messages = [*history, {"role": "assistant", "content": _SENTINEL}, *following]
    text = apply_template(tokenizer, messages, tokenize=False, add_generation_prompt=bool(following))
    if text.count(_SENTINEL) != 1:
        raise DataError(
            f"the chat template writes an assistant message {text.count(_SENTINEL)} times; "
            "samples of several turns need a template that writes each message once"
        )
    before, _, after = text.partition(_SENTINEL)
    return before, after
