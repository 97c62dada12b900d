"""GroupsInFlight: generates and scores samples while the policy trains.

`Scheduler` decides; this class carries out its decisions, with three kinds of threads: the threads of the generators'
workers deliver completions, threads of the environment score them, and the thread of the training loop draws prompts,
takes the groups of a step and restarts lost generators. One lock guards everything that they share.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lucidrl.collectors.groups import Changes, Group, Outcome, Phase, Rules, Start, Ticket
from lucidrl.collectors.rollouts import Sample
from lucidrl.collectors.saved_samples import restored_sample, saved_sample
from lucidrl.collectors.scheduler import Scheduler
from lucidrl.collectors.scoring import Job, ScoringThreads
from lucidrl.collectors.turns import Turns
from lucidrl.data.datasets import Prompt
from lucidrl.data.stream import Dataset
from lucidrl.envs.text.interfaces import EnvReply
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import CheckpointError, EnvironmentFailure, WorkerError
from lucidrl.models.generation.continuous import STALL_TIMEOUT, ContinuousGenerator
from lucidrl.models.generation.interfaces import Completion, GenerationRequest
from lucidrl.models.generation.sampling import draw_key
from lucidrl.profiling.spans import recorder, span
from lucidrl.profiling.worker_times import worker_clock

_log = logging.getLogger(__name__)

IN_FLIGHT = "in_flight"
"""Key of the state of this class in the state of a collector."""
_SHOWN: tuple[Phase, ...] = ("waiting", "generating", "scoring", "finished")
"""Phases whose numbers of samples are metrics."""
_CHECK_S = 1.0
"""Time between two looks for lost generators while a step waits."""


class GroupsInFlight:
    """Samples of the next steps.

    Args:
        prompts: drawn in order, one per group.
        turns: extends samples; this class uses a copy of its tokenizer, which other threads must not share.
        rules: the settings.
        num_env_calls: most calls of the environment at a time.
        stall_timeout_s: raise if a step waits this long without a completion, a step result, a loss or a restart.
    """

    def __init__(
        self,
        generator: ContinuousGenerator,
        runner: EnvRunner,
        prompts: Dataset[Prompt],
        turns: Turns,
        rules: Rules,
        *,
        num_env_calls: int,
        stall_timeout_s: float,
        seed: int = 0,
    ) -> None:
        self.scheduler = Scheduler(rules, time.monotonic)
        self._generator, self._runner, self._prompts = generator, runner, prompts
        self._turns = replace(turns, tokenizer=deepcopy(turns.tokenizer))
        self._rules, self._seed, self._stall_timeout_s = rules, seed, stall_timeout_s
        self._changed = threading.Condition()
        """Its lock guards all attributes below, and the scheduler."""
        self._samples: dict[int, list[Sample]] = {}
        """Samples of the groups in flight, by number of the group."""
        self._places: dict[int, dict[str, Any]] = {}
        """Position in the prompts before the draw of each group in flight."""
        self._failure: BaseException | None = None
        self._last_progress = time.monotonic()
        self._num_removed = 0
        """Groups removed since the last step, because the environment or the rules dropped all their samples."""
        self._counted: Counter[str] = Counter()
        """`counts` of the scheduler at the last step."""
        self._last_take = time.monotonic()
        self._is_started = self._is_closed = False
        self._scoring = ScoringThreads(runner, num_env_calls, self._scored, self._fail)
        generator.on_lost, generator.on_failure = self._note_loss, self._fail

    # Called by the training loop.

    def take(self) -> tuple[list[list[Sample]], dict[str, float]]:
        """Wait for the groups of the next step; return their samples, and metrics.

        Raises:
            LucidError: a thread failed, a generator exceeded its restarts, or nothing happens any more.
        """
        self._start()
        started = checked = time.monotonic()
        self._note_progress()  # full queues made none while the policy trained, validated and saved
        with span("idle"):
            while (taken := self._try_take()) is None:
                if time.monotonic() - checked >= _CHECK_S:
                    if self._generator.recover():
                        self._note_progress()
                    checked = time.monotonic()
        groups, lengths = taken
        return groups, {**lengths, **self._metrics(time.monotonic() - started)}

    def set_version(self, version: int) -> None:
        """Note a refit of all generators."""
        with self._changed:
            self._act_on(self.scheduler.set_version(version))
            if self._is_started:
                self._draw()
                self._request()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompts and everything that no step has trained on, as plain values.

        Samples that are not done are not part of it; they begin again after a resume.
        """
        with self._changed:
            state = self.scheduler.state_dict()
            numbers = list(self.scheduler.groups)
            first = numbers[0] if numbers else self.scheduler.next_number
            state["first_number"] = first
            state["samples"] = [
                [
                    saved_sample(sample) if entry is not None else sample.index
                    for sample, entry in zip(self._samples[group["number"]], group["samples"], strict=True)
                ]
                for group in state["groups"]
            ]
            prompts = self._places[first] if numbers else self._prompts.state_dict()
            return {**prompts, IN_FLIGHT: state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an asynchronous or a synchronous run."""
        self._prompts.load_state_dict(state)
        with self._changed:
            if IN_FLIGHT not in state:
                self.scheduler.step, self.scheduler.version = state["batches"] + 1, state["batches"]
                return
            saved = state[IN_FLIGHT]
            self.scheduler.load_state_dict(saved)
            self._counted = Counter(self.scheduler.counts)
            entries = {group["number"]: index for index, group in enumerate(saved["groups"])}
            for number in range(saved["first_number"], saved["next_number"]):
                place, [prompt] = self._prompts.state_dict(), self._prompts.take(1)
                if number not in entries:  # trained already
                    continue
                group = saved["groups"][entries[number]]
                if prompt.prompt_id != group["prompt_id"]:
                    raise CheckpointError(
                        f"group {number} of the checkpoint has the prompt {group['prompt_id']!r}, but the data now has "
                        f"{prompt.prompt_id!r} in this place; resume with the data and the seed of the saved run"
                    )
                self._places[number] = place
                self._samples[number] = [
                    self._new_sample(prompt, one) if isinstance(one, int) else restored_sample(prompt, one)
                    for one in saved["samples"][entries[number]]
                ]

    def close(self) -> None:
        """Start nothing more; may be called twice. Calls of the environment that run end with the runner."""
        with self._changed:
            self._is_closed = True
        self._scoring.close()
        self._generator.close()

    def _start(self) -> None:
        with self._changed:
            if self._is_started:
                return
            self._is_started = True
        self._scoring.start()

    def _note_progress(self) -> None:
        with self._changed:
            self._last_progress = time.monotonic()

    def _try_take(self) -> tuple[list[list[Sample]], dict[str, float]] | None:
        """Return the groups of the next step; None if they are not ready after a moment."""
        with self._changed:
            self._check()
            self._draw()
            self._request()
            lengths = self._lengths()
            taken = self.scheduler.take()
            if taken is None:
                with worker_clock.waiting():
                    self._changed.wait(_CHECK_S)
                return None
            groups, changes = taken
            self._act_on(changes)
            samples = [self._removed(group) for group in groups]
            self._num_removed = 0
            self._draw()
            self._request()
            return samples, lengths

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._num_removed >= self._rules.prompts_per_step:
            raise EnvironmentFailure(
                f"all samples of {self._num_removed} groups were dropped since the last step (dropped so far by the "
                f"environment: {dict(self._runner.counts)}, for their staleness: {self.scheduler.counts['dropped']}); "
                "fix the environment, raise env.timeout_s, or set async.stale_samples=wait"
            )
        if (waited_s := time.monotonic() - self._last_progress) > self._stall_timeout_s:
            raise WorkerError(
                f"step {self.scheduler.step} has waited for {waited_s:.0f} s without any progress: "
                f"{self.scheduler.longest()}; look into the logs of that worker, or raise the timeout, which is "
                f"{STALL_TIMEOUT} + env.timeout_s"
            )

    # The lock is held in all methods of this part.

    def _draw(self) -> None:
        """Draw the prompts of the groups that may start."""
        for _ in range(self.scheduler.num_wanted()):
            place, [prompt] = self._prompts.state_dict(), self._prompts.take(1)
            number = self.scheduler.add_group(prompt.prompt_id)
            size = self._rules.samples_per_prompt
            # A prompt that is in flight already, as at the end of an epoch, gets other indices and so other names.
            open_samples = (one for group in self._samples.values() for one in group)
            taken = [one.index for one in open_samples if one.prompt.prompt_id == prompt.prompt_id]
            self._places[number] = place
            self._samples[number] = self._turns.new_samples(prompt, max(taken, default=-1) + 1, size)

    def _request(self) -> None:
        """Request the completions that may start."""
        if self._is_closed:
            return
        for number in self._generator.live():
            self.scheduler.generator_started(number)
        for start in self.scheduler.starts():
            self._generator.submit(start.generator, self._request_of(start), partial(self._completed, start.ticket))

    def _request_of(self, start: Start) -> GenerationRequest:
        group, index, _ = start.ticket
        sample = self._samples[group][index]
        return GenerationRequest(
            request_id=_request_id(start.ticket),
            prompt_ids=torch.cat([message["token_ids"] for message in sample.log]),
            draw_key=draw_key(self._seed, "group", group, index, start.turn),
            stop_strings=sample.prompt.stop_strings,
            may_continue=start.turn < self._turns.max_turns,
        )

    def _act_on(self, changes: Changes) -> None:
        for ticket, generator in changes.aborted:
            self._generator.abort(generator, [_request_id(ticket)])
        for number, index in changes.restarted:
            old = self._samples[number][index]
            self._samples[number][index] = self._new_sample(old.prompt, old.index)
        for group in changes.removed:
            self._removed(group)
            self._num_removed += 1
            _log.warning(
                "group %d (prompt %r) is not trained on, because all its samples were dropped",
                group.number,
                group.prompt_id,
            )

    def _removed(self, group: Group) -> list[Sample]:
        """Remove and return the samples of a group that is not in flight any more."""
        samples = self._samples.pop(group.number)
        del self._places[group.number]
        for sample, state in zip(samples, group.samples, strict=True):
            if state.phase == "dropped" and not sample.is_dropped:
                sample.is_dropped = sample.is_done = True
                sample.reward, sample.components = 0.0, {}
        return samples

    def _new_sample(self, prompt: Prompt, index: int) -> Sample:
        [sample] = self._turns.new_samples(prompt, index, 1)
        return sample

    def _progressed(self) -> None:
        self._last_progress = time.monotonic()
        self._request()
        for phase in _SHOWN:
            recorder.count(f"{phase} samples", self.scheduler.num_in(phase))
        self._changed.notify_all()

    def _lengths(self) -> dict[str, float]:
        lengths = {f"async/{phase}_samples": float(self.scheduler.num_in(phase)) for phase in _SHOWN}
        return {**lengths, "async/complete_groups": float(self.scheduler.num_complete)}

    # Called by other threads.

    def _completed(self, ticket: Ticket, completion: Completion | None) -> None:
        if completion is None:
            return  # `_note_loss` let the sample wait again
        with self._changed:
            oldest = int(completion.policy_versions.min())
            if self._is_closed or not self.scheduler.generated(ticket, oldest):
                return
            sample = self._samples[ticket.group][ticket.sample]
            turn = self.scheduler.groups[ticket.group].samples[ticket.sample].turn
            self._turns.append_completion(sample, turn, completion)
            self._scoring.put(Job(ticket, sample, turn, self._turns.request(sample, turn)))
            self._progressed()

    def _note_loss(self, number: int) -> None:
        with self._changed:
            self.scheduler.generator_lost(number)
            self._progressed()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if not self._is_closed:
                self._failure = self._failure or error
            self._changed.notify_all()

    def _scored(self, jobs: Sequence[Job], results: Sequence[EnvReply | None]) -> None:
        with self._changed:
            if self._is_closed:
                return
            for job, result in zip(jobs, results, strict=True):
                if not self.scheduler.is_scoring(job.ticket):
                    continue  # the sample is dropped, or begins again
                sample = job.sample
                self._turns.apply(sample, job.turn, result)
                outcome: Outcome = "dropped" if sample.is_dropped else "finished" if sample.is_done else "next turn"
                self._act_on(self.scheduler.scored(job.ticket, outcome))
            self._progressed()

    def _metrics(self, idle_s: float) -> dict[str, float]:
        now = time.monotonic()
        elapsed_s, self._last_take = now - self._last_take, now
        idle = self._generator.take_idle_s()
        with self._changed:
            counts = Counter(self.scheduler.counts)
        new, self._counted = {name: counts[name] - self._counted[name] for name in ("dropped", "regenerated")}, counts
        return {
            **{f"async/{name}_samples": float(number) for name, number in new.items()},
            "async/trainer_idle_fraction": min(1.0, idle_s / max(elapsed_s, 1e-9)),
            "async/generator_idle_fraction": min(1.0, sum(idle) / len(idle) / max(elapsed_s, 1e-9)),
        }


def _request_id(ticket: Ticket) -> str:
    return f"group {ticket.group} sample {ticket.sample} attempt {ticket.attempt}"
