"""Turns of a sample: render the prompt, append completions, apply what the environment returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lucidrl.collectors.rollouts import Sample
from lucidrl.data.datasets import Prompt, naming
from lucidrl.data.interfaces import KEYS_OF_TOKENS
from lucidrl.data.messages import render_next_turn, render_prompt, rewrites_history, sampled_message, with_tokens
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.errors import DataError
from lucidrl.models.generation.interfaces import Completion


@dataclass(frozen=True)
class Turns:
    """Extends samples turn by turn."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int
    """Context length of the model; prompts must be shorter by at least one token."""
    max_turns: int

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt; raise DataError if it does not fit the context."""
        with naming(prompt):
            ids = render_prompt(self.tokenizer, prompt.messages)
        if len(ids) >= self.context_length:
            remedy = "shorten it or remove it"
            if prompt.place:
                remedy = f"set data.max_prompt_tokens={self.context_length - 1} or less to skip such rows"
            raise DataError(
                f"{prompt.label} has {len(ids)} tokens, which leaves no space for a completion in the model's context "
                f"of {self.context_length} tokens; {remedy}"
            )
        return ids

    def new_samples(self, prompt: Prompt, first: int, number: int) -> list[Sample]:
        """Return samples of a prompt, with indices from `first`."""
        ids = self.prompt_ids(prompt)
        return [
            Sample(prompt, first + index, with_tokens(prompt.messages, ids), dict(prompt.info))
            for index in range(number)
        ]

    def append_completion(self, sample: Sample, turn: int, completion: Completion, text: str | None = None) -> None:
        """Append the assistant message; `text` is that of its tokens, if the caller has it."""
        if text is None:
            text = str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        tokens, logprobs, versions = completion.token_ids, completion.logprobs, completion.policy_versions
        sample.log.append(sampled_message(text, tokens, logprobs, versions))
        sample.is_truncated |= completion.truncated
        sample.turns = turn

    def request(self, sample: Sample, turn: int) -> EnvRequest:
        """Return the request to score the newest completion."""
        return EnvRequest(sample.name, sample.log, sample.info, turn)

    def apply(self, sample: Sample, turn: int, result: EnvReply | None) -> None:
        """Apply a step result; append the environment's messages to a sample that is not done."""
        if result is None or result.is_dropped:
            sample.is_dropped = sample.is_done = True
            sample.reward, sample.components = 0.0, {}
            sample.metrics = {} if result is None else result.metrics
            return
        sample.add_reward(result.reward, result.components)
        sample.metrics, sample.answer = result.metrics, result.answer
        sample.info = sample.info if result.info is None else result.info
        sample.is_done = result.done or turn == self.max_turns
        if not sample.is_done:
            self._append_observation(sample, result.messages)

    def _append_observation(self, sample: Sample, messages: Sequence[Mapping[str, Any]]) -> None:
        with naming(sample.prompt):
            is_rewritten = rewrites_history(self.tokenizer, sample.log, messages)
            if is_rewritten:
                ids, num_before = render_prompt(self.tokenizer, [*sample.log, *messages]), 0
            else:
                ids, num_before = render_next_turn(self.tokenizer, sample.log, messages), sample.num_tokens
        if num_before + len(ids) >= self.context_length:
            sample.is_done = sample.is_truncated = True
        elif is_rewritten:
            sample.earlier_logs.append(sample.log)
            texts = [{key: message[key] for key in message if key not in KEYS_OF_TOKENS} for message in sample.log]
            sample.log = with_tokens([*texts, *messages], ids)
        else:
            sample.log.extend(with_tokens(messages, ids))
