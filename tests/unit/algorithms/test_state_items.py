"""Every item of a checkpoint's state is read: a run resumed without it is refused, or ends elsewhere.

The items are those of a real checkpoint, down to single numbers and texts, so that a new one without a reader fails.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lucidrl.algorithms.grpo import GRPO
from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.errors import LucidError
from lucidrl.models import optim
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes import training_run
from tests.faults.records import digests, metrics

Path = tuple[str | int, ...]

SETTINGS = (
    "env.name=tests.faults.drawing:DrawingEnv",
    "data.validation_fraction=0",
    "env.max_concurrency=1",
    "validation.num_prompts=0",
    "checkpoint.metric=null",
    "grpo.advantages.estimator=plain",
    "collector={prompts_per_step: 2, samples_per_prompt: 2}",
    "policy={model_name: embedded-untrained, generation: {max_new_tokens: 2}}",
    "policy.optimizer.name=tests.faults.drawing.NoisyAdamW",
    "policy.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 8}}",
)
SCENARIOS: dict[str, tuple[str, ...]] = {
    # Losses are scaled in float16: the scale falls in step 2, and the count of good steps decides when it rises.
    "all goes well but for one step": ("policy.precision=float16", "env.kwargs={nonfinite_at: [2]}"),
    # Steps 3 and 4 are skipped, and two in a row end the run.
    "it ends with an error": ("env.kwargs={nonfinite_at: [3, 4]}", "policy.max_nonfinite_steps=2"),
}
READ_ELSEWHERE = {
    # By completions of prompts without draw keys, which a run does not use; see the tests of a rank's state.
    ("policy", "ranks", 0, "generator_calls"),
    # By a run with validation; see `test_a_stop_skips_the_validation_that_is_due_and_a_resume_makes_up_for_it`.
    ("is_validation_skipped",),
    # By the file's reader, which refuses the state of another kind of optimizer.
    ("kind",),
}


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, value) of every single number, text or None."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


MISSING = object()


def with_item(state: Any, path: Path, value: Any) -> Any:
    """A copy of the state in which one item has another value, or is missing."""
    result = copy.deepcopy(state)
    *parents, last = path
    place = result
    for key in parents:
        place = place[key]
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    return result


@dataclasses.dataclass
class Scenario:
    """A run of three steps that is resumed to six, again and again from the same checkpoint."""

    run: Any
    name: str
    monkeypatch: pytest.MonkeyPatch
    run_ids: list[str]
    """Under which trackers know the runs made so far."""

    def __post_init__(self) -> None:
        self.settings = (*SETTINGS, *SCENARIOS[self.name])
        self.fresh: dict[str, Any] = {}
        """What a run keeps before its first step."""

        def start(loop: GRPO) -> int:
            self.fresh = self.fresh or loop.state_dict()
            return run_loop(loop)

        run_loop = GRPO.run
        self.monkeypatch.setattr(GRPO, "run", start)
        self.broken, _ = self.run("grpo", self.name, *self.settings, "grpo.max_steps=3")
        self.saved = CheckpointManager(self.broken.path / "checkpoints").latest().state
        self.expected = self.outcome()

    def outcome(self) -> dict[str, Any]:
        """What comes of resuming: where it ends and what was said, or the error."""
        name = f"{self.name}, resumed"
        shutil.copytree(self.broken.path, self.broken.path.parent / name)
        try:
            resumed, _ = self.run("grpo", name, *self.settings, "grpo.max_steps=6", resume=True)
            result = {**digests(resumed.path), "said": resumed.watcher.messages, "run_id": self.run_ids[-1]}
        except LucidError as error:
            result = {"error": str(error), "metrics": metrics(self.broken.path.parent / name)}
        shutil.rmtree(self.broken.path.parent / name)
        return result

    def outcome_with(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same, if the checkpoint held another state."""
        with self.monkeypatch.context() as patch:
            newest = CheckpointManager.to_resume
            patch.setattr(
                CheckpointManager, "to_resume", lambda manager: dataclasses.replace(newest(manager), state=state)
            )
            return self.outcome()

    def outcome_with_optimizer(self, change: Any) -> dict[str, Any]:
        """The same, if `change(state, fresh state)` were the optimizer's."""
        load = optim.PolicyOptimizer.load_state_dict
        with self.monkeypatch.context() as patch:
            patch.setattr(
                optim.PolicyOptimizer,
                "load_state_dict",
                lambda optimizer, state: load(optimizer, change(state, optimizer.state_dict())),
            )
            return self.outcome()


@pytest.fixture
def scenario(run, monkeypatch):
    monkeypatch.setattr(optim, "_STEPS_PER_LOSS_SCALE", 3)
    make_logger, run_ids = training_run.Logger, []

    def recorded(config):
        logger = make_logger(config)
        run_ids.append(logger.run_id)
        return logger

    monkeypatch.setattr(training_run, "Logger", recorded)
    return lambda name: Scenario(run, name, monkeypatch, run_ids)


@pytest.mark.slow
def test_without_any_item_of_the_runs_state_it_is_refused_or_ends_elsewhere(scenario):
    scenarios = [scenario(name) for name in SCENARIOS]
    assert "error" not in scenarios[0].expected
    assert "2 optimizer steps in a row" in scenarios[1].expected["error"]
    items = dict(leaves(scenarios[0].saved))
    assert {("step",), ("collector", "cursors", 0), ("driver", "random", "torch")} < items.keys()
    unread = []
    for path in items:
        if path in READ_ELSEWHERE:
            continue
        for one in scenarios:
            fresh, saved = dict(leaves(one.fresh))[path], dict(leaves(one.saved))[path]
            # An item that a new run begins with too would not be missed: there it has to be refused.
            changed = with_item(one.saved, path, fresh if fresh != saved else MISSING)
            if one.outcome_with(changed) != one.expected:
                break
        else:
            unread.append(path)
    assert unread == []


@pytest.mark.slow
def test_without_any_item_of_the_optimizers_state_the_run_ends_elsewhere(scenario):
    """Its parameter groups apart: they hold settings, which are those that are configured now."""
    one = scenario("all goes well but for one step")
    seen: list[dict[str, Any]] = []
    assert one.outcome_with_optimizer(lambda state, fresh: seen.append(state) or state) == one.expected
    (saved,) = seen
    moments = saved["optimizer"]["state"][0].keys()
    others = {name for name in saved if (name,) not in READ_ELSEWHERE} - {"optimizer"}
    assert moments | others == {"step", "exp_avg", "exp_avg_sq", "scheduler", "masters", "loss_scale", "good_steps"}
    changes = {
        **{name: partial(with_zero_moment, name) for name in moments},
        **{name: partial(with_fresh, name) for name in others},
    }
    assert [name for name, change in changes.items() if one.outcome_with_optimizer(change) == one.expected] == []


def with_zero_moment(name: str, state: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    moments = state["optimizer"]["state"].items()
    zeroed = {index: {**entry, name: torch.zeros_like(entry[name])} for index, entry in moments}
    return {**state, "optimizer": {**state["optimizer"], "state": zeroed}}


def with_fresh(name: str, state: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    return {**state, name: fresh[name]}


@pytest.mark.slow
def test_without_the_weights_the_run_ends_elsewhere(scenario, monkeypatch):
    one = scenario("all goes well but for one step")
    monkeypatch.setattr(Policy, "load", lambda policy, folder: None)
    assert one.outcome() != one.expected
