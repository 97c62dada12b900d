"""TextCollector: prompts through the generator and the environment, turn by turn, until every conversation is done."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Unpack

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.profile import RolloutProfiler
from lucidrl.collectors.rollouts import Conversation, Rollouts
from lucidrl.data.datasets import Prompt, PromptOrder
from lucidrl.data.messages import render_prompt, render_reply, sampled_message, with_tokens
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.envs.text.interfaces import EnvRequest
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import ConfigError, DataError, EnvironmentFailure, RefitError
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
from lucidrl.models.generation.sampling import draw_key
from lucidrl.profiling import gate
from lucidrl.profiling.hook import ProfileOptions, ProfileSettings
from lucidrl.profiling.ranges import profiled
from lucidrl.profiling.spans import span


class TextCollector:
    """Collects scored conversations.

    Args:
        generator: completes prompts.
        runner: scores completions; closed with the collector.
        prompts: what is asked in training, in an order that depends on `seed` alone.
        context_length: a prompt must leave room for at least one new token.
    """

    num_workers = 1

    def __init__(
        self,
        generator: GenerationInterface,
        runner: EnvRunner,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        config: TextCollectorConfig,
        *,
        context_length: int,
        seed: int = 0,
    ):
        self._generator = generator
        self.runner = runner
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._config = config
        self._context_length = context_length
        self._seed = seed
        self._order = PromptOrder(len(prompts), seed)
        self._position = 0
        self._batches = 0
        self._num_replaced: Counter[str] = Counter()  # as of the last record, by metric
        self._rendered: dict[str, list[int]] = {}
        self._profiler = RolloutProfiler("text collector")

    def __iter__(self) -> Iterator[Rollouts]:
        while True:
            yield self.collect()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that cannot be asked, before the first one is.

        Raises:
            DataError: naming the prompt and its length.
        """
        for prompt in prompts:
            self._prompt_ids(prompt)

    def collect(self) -> Rollouts:
        """The next step's conversations."""
        with self._profiler, span("rollout"):
            return self._collect()

    def _collect(self) -> Rollouts:
        self._batches += 1
        wanted = self._config.prompts_per_step
        asked: Counter[str] = Counter()
        kept: list[list[Conversation]] = []
        silent: list[list[Conversation]] = []
        for _ in range(1 + self._config.refill_rounds):
            prompts = self._next_prompts(wanted - len(kept))
            for group in self._run_groups(prompts, self._config.samples_per_prompt, asked):
                (kept if _has_signal(group) or not self._config.refill_rounds else silent).append(group)
            if len(kept) == wanted:
                break
        groups = (kept + silent)[:wanted]
        extra = {
            "groups_with_signal_fraction": _mean(_has_signal(group) for group in groups),
            "groups_without_signal_replaced": float(len(kept) + len(silent) - wanted),
            **self._newly_replaced(),
        }
        if all(conversation.is_dropped for group in groups for conversation in group):
            raise EnvironmentFailure(
                f"the environment could judge none of the step's {wanted * self._config.samples_per_prompt} samples "
                f"(dropped so far: {dict(self.runner.counts)}); fix it, or raise env.timeout_s if it is slow"
            )
        return self._rollouts(groups, extra)

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Rollouts:
        """One conversation for each prompt; takes nothing from the training prompts.

        Args:
            batch_size: prompts completed together; by default all.
            is_stopped: checked before each batch; once it is true, the rest is left out.
        """
        groups: list[list[Conversation]] = []
        asked: Counter[str] = Counter()
        size = batch_size or max(1, len(prompts))
        for start in range(0, len(prompts), size):
            if is_stopped():
                break
            groups += self._run_groups(prompts[start : start + size], 1, asked, greedy=True)
        return self._rollouts(groups, extra={})

    @profiled("TextCollector.update_policy_weights_")
    def update_policy_weights_(self, version: int) -> None:
        self._generator.update_weights(version)

    def enable_profile(self, **options: Unpack[ProfileOptions]) -> None:
        """Record some of the next calls of `collect` with torch's profiler; see `ProfileSettings` for the options.

        The trace is written after the last of them; or, with what there is by then, when one fails, at
        `disable_profile` and at `shutdown`.

        Raises:
            ConfigError: before anything starts, if it cannot be done as asked.
        """
        self._profiler.enable(ProfileSettings(**options).checked(self.num_workers))

    def disable_profile(self) -> None:
        """Write what was recorded so far, and record no more; may be called twice."""
        self._profiler.disable()

    def set_profiling_enabled(self, enabled: bool) -> None:
        """Show the per-frame ranges of this process from now on, or silence them; they must be armed."""
        gate.set_profiling_enabled(enabled)

    def map_fn(self, name: str, list_of_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method `name` of every worker, which is this collector."""
        if len(list_of_args) != 1:
            raise ConfigError(f"list_of_args has {len(list_of_args)} tuples for 1 worker; give one tuple per worker")
        return [getattr(self, name)(*list_of_args[0])]

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompts, and what the environment keeps; no conversation is open between two batches."""
        return {"position": self._position, "batches": self._batches, **self.runner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position, self._batches = state["position"], state["batches"]
        self.runner.load_state_dict(state)

    def shutdown(self) -> None:
        """Release everything; may be called twice."""
        self._profiler.disable()
        self.runner.close()

    def _next_prompts(self, count: int) -> list[Prompt]:
        chosen = self._order.take(self._position, count)
        self._position += count
        return [self._prompts[index] for index in chosen]

    def _run_groups(
        self, prompts: Sequence[Prompt], samples: int, asked: Counter[str], greedy: bool = False
    ) -> list[list[Conversation]]:
        """Finished conversations, a list for each prompt.

        `asked` counts the samples of each prompt in this step: one that comes twice, as around the end of an epoch,
        gets new samples and not copies.
        """
        groups = []
        for prompt in prompts:
            first = asked[prompt.prompt_id]
            groups.append([self._opened(prompt, sample) for sample in range(first, first + samples)])
            asked[prompt.prompt_id] += samples
        open_ones = [conversation for group in groups for conversation in group]
        for turn in range(1, self._config.max_turns + 1):
            with span("generate"):
                output = self._generator.generate(self._generation_batch(open_ones, turn), greedy=greedy)
                self._append_completions(open_ones, turn, output.to("cpu"))
            with span("environment"):
                self._judge(open_ones, turn)
            open_ones = [conversation for conversation in open_ones if not conversation.is_done]
            if not open_ones:
                break
        return groups

    def _opened(self, prompt: Prompt, sample: int) -> Conversation:
        return Conversation(prompt, sample, with_tokens(prompt.messages, self._prompt_ids(prompt)), dict(prompt.info))

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if prompt.prompt_id not in self._rendered:
            ids = render_prompt(self._tokenizer, prompt.messages)
            if len(ids) >= self._context_length:
                raise DataError(
                    f"prompt {prompt.prompt_id!r} has {len(ids)} tokens; with at least one answer token it does not "
                    f"fit the model's context of {self._context_length} tokens; shorten it or take it out"
                )
            self._rendered[prompt.prompt_id] = ids
        return self._rendered[prompt.prompt_id]

    def _generation_batch(self, conversations: list[Conversation], turn: int) -> BatchedDataDict[GenerationDatumSpec]:
        """The conversations so far, as prompts."""
        prompts = [torch.cat([message["token_ids"] for message in c.log]) for c in conversations]
        keys = [draw_key(self._seed, self._batches, c.prompt.prompt_id, c.sample, turn) for c in conversations]
        return BatchedDataDict(
            {
                "input_ids": torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True),
                "input_lengths": torch.tensor([len(prompt) for prompt in prompts]),
                "draw_keys": torch.tensor(keys, dtype=torch.int64),
                "stop_strings": [list(c.prompt.stop_strings) for c in conversations],
            }
        )

    def _append_completions(
        self, conversations: list[Conversation], turn: int, output: BatchedDataDict[GenerationOutputSpec]
    ) -> None:
        """Append the sampled message to each conversation."""
        ends = output["unpadded_sequence_lengths"].tolist()
        starts = (output["unpadded_sequence_lengths"] - output["generation_lengths"]).tolist()
        answers = [ids[start:end] for ids, start, end in zip(output["output_ids"], starts, ends, strict=True)]
        texts = self._tokenizer.batch_decode(answers, skip_special_tokens=True)
        for row, conversation in enumerate(conversations):
            logprobs = output["logprobs"][row, starts[row] : ends[row]]
            version = int(output["policy_versions"][row])
            conversation.log.append(sampled_message(texts[row], answers[row], logprobs, version))
            conversation.is_truncated |= bool(output["truncated"][row])
            conversation.turns = turn

    def _judge(self, conversations: list[Conversation], turn: int) -> None:
        """Let the environment reward each answer and, where it is not done, append its reply."""
        requests = [EnvRequest(c.name, c.log, c.info, turn) for c in conversations]
        with span("reward"):
            replies = self.runner.step(requests)
        for conversation, reply in zip(conversations, replies, strict=True):
            if reply is None:
                conversation.is_dropped = conversation.is_done = True
                conversation.reward = 0.0
                continue
            conversation.reward += reply.reward
            conversation.metrics = reply.metrics
            conversation.info = conversation.info if reply.info is None else reply.info
            conversation.is_done = reply.done or turn == self._config.max_turns
            if not conversation.is_done:
                self._append_reply(conversation, reply.messages)

    def _append_reply(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]]) -> None:
        ids = render_reply(self._tokenizer, conversation.log, messages)
        if conversation.num_tokens + len(ids) >= self._context_length:
            conversation.is_done = conversation.is_truncated = True
            return
        conversation.log.extend(with_tokens(messages, ids))

    def _newly_replaced(self) -> dict[str, float]:
        """Since the last batch of rollouts to train on, whatever they were lost in."""
        before = self._num_replaced
        self._num_replaced = Counter(
            replaced_generators=self._generator.num_replaced, replaced_env_workers=self.runner.num_replaced
        )
        return {name: float(number - before[name]) for name, number in self._num_replaced.items()}

    def _rollouts(self, groups: list[list[Conversation]], extra: dict[str, float]) -> Rollouts:
        conversations = [conversation for group in groups for conversation in group]
        judged = [conversation for conversation in conversations if not conversation.is_dropped]
        metrics = {
            **_environment_metrics(judged),
            "reward": _mean(c.reward for c in judged),
            "turns": _mean(c.turns for c in judged),
            "answer_tokens": _mean(c.num_sampled_tokens for c in judged),
            "truncated_fraction": _mean(c.is_truncated for c in judged),
            "dropped_samples": float(len(conversations) - len(judged)),
            "sampled_tokens": float(sum(c.num_sampled_tokens for c in conversations)),
            **extra,
        }
        group_ids = torch.tensor([number for number, group in enumerate(groups) for _ in group], dtype=torch.int64)
        return Rollouts(conversations, group_ids, self._version_of(conversations), metrics)

    def _version_of(self, conversations: Sequence[Conversation]) -> int:
        """The one version that made all answers: samples of different policies must not be taken for those of one."""
        expected = self._generator.policy_version
        messages = [message for conversation in conversations for message in conversation.log]
        versions = {message["policy_version"] for message in messages if "policy_version" in message}
        if others := sorted(versions - {expected}):
            raise RefitError(
                f"answers were made by weights of version {others[0]}, but the collector asked for version {expected}; "
                "update the weights between batches, and those of all generators"
            )
        return expected


def _has_signal(group: Sequence[Conversation]) -> bool:
    return len({conversation.reward for conversation in group if not conversation.is_dropped}) > 1


def _environment_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Each metric's mean over the conversations that have it."""
    found = [conversation.metrics or {} for conversation in conversations]
    names = sorted({name for metrics in found for name in metrics})
    return {name: _mean(metrics[name] for metrics in found if name in metrics) for name in names}


def _mean(values: Any) -> float:
    numbers = [float(value) for value in values]
    try:
        return fmean(numbers) if numbers else math.nan
    except (OverflowError, ValueError):  # numbers near the limits of a float, or infinities of both signs
        return sum(numbers) / len(numbers)
