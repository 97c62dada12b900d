"""Asynchronous GRPO with vLLM: weights change while rows run, and a replica that fails loses no sample."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from lucidrl.algorithms.grpo import GRPO
from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.models.generation import separate
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from tests.faults.mortal_generators import FOLDER_VARIABLE, MortalVllm, plan_death, was_met
from tests.unit.algorithms.async_parts import Slow
from tests.vllm.vllm_cases import needs_vllm

pytestmark = needs_vllm
MODES = ("keep", "recompute", "finish", "abort")
"""Values of `in_flight`, by version modulo 4."""
SETTINGS = (
    "num_threads=1",
    "cluster.num_threads=1",
    "policy.model_name=embedded-untrained",
    "policy.generation.engine=vllm",
    "policy.generation.placement=separate",
    "policy.generation.max_new_tokens=8",
    "policy.generation.max_concurrent_rows=32",
    f"env.name={__name__}:TwoTurns",
    "collector.max_turns=2",
    "collector.prompts_per_step=10",
    "collector.samples_per_prompt=2",
    "grpo.async.max_staleness=2",
    "grpo.max_steps=10",
    "validation.num_prompts=0",
    "data.validation_fraction=0",
    "checkpoint.metric=null",
    "checkpoint.every=0",
    "tracking.tensorboard=false",
    "tracking.monitor=false",
    "tracking.dump_samples_every=1",
    "report.enabled=false",
)
"""Ten steps train on all 100 prompts."""


class TwoTurns(ArithmeticEnv):
    """Asks again after the first completion."""

    def __init__(self) -> None:
        super().__init__(ArithmeticConfig(operations=("+",), max_operand=9))

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        again = EnvReply(0.0, done=False, messages=({"role": "user", "content": "Again."},))
        replies = await super().step(batch)
        return [again if one.turn == 1 else reply for one, reply in zip(batch, replies, strict=True)]


class ChangingVllm(Slow, MortalVllm):
    """Uses another mode for each version."""

    def commit_refit(self, version: int) -> None:
        mode = MODES[version % len(MODES)]
        self.engine._config = self.engine._config.model_copy(update={"in_flight": mode})
        super().commit_refit(version)


@dataclass
class Watcher:
    """Presses Ctrl-C at a step."""

    interrupt_at: int | None = None

    def on_validation(self, step: int, metrics: Any) -> None: ...

    def on_samples(self, step: int, message_logs: Any, rewards: Any) -> None: ...

    def on_step(self, step: int, metrics: Any) -> None:
        if step == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)

    def announce(self, message: str) -> None: ...


@dataclass
class Recorded:
    """A run that lost its replica, was stopped and was resumed."""

    folder: Path
    tokens: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Policy version of the step, and versions of the tokens, of every completion."""

    @property
    def records(self) -> list[dict[str, Any]]:
        records = [orjson.loads(line) for line in (self.folder / "metrics.jsonl").read_bytes().splitlines()]
        return [record for record in records if "train/replaced_generators" in record]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    found = Recorded(tmp_path_factory.mktemp("run"))
    prepare, train_policy = GRPO.prepare, Policy.train

    def noted(self: GRPO, rollouts: Any, *args: Any, **kwargs: Any) -> Any:
        for sample in rollouts.samples:
            versions = [message["policy_versions"] for message in sample.log if "policy_versions" in message]
            found.tokens += [(self.policy.policy_version, one) for one in versions]
        return prepare(self, rollouts, *args, **kwargs)

    def killing(self: Policy, *args: Any, **kwargs: Any) -> Any:
        if self.policy_version == 2:  # before a refit with abort
            plan_death("advance", 0)
        return train_policy(self, *args, **kwargs)

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("deaths")))
        patched.setitem(separate.ENGINES, "vllm", ChangingVllm)
        patched.setattr(GRPO, "prepare", noted)
        patched.setattr(Policy, "train", killing)
        config = load_config(GRPORunConfig, overrides=SETTINGS)
        assert train(config, found.folder, Watcher(interrupt_at=5)) == 5
        assert train(config, found.folder, Watcher(), resume=True) == 10
        assert was_met("advance", 0)
    torch.set_num_threads(threads)
    return found


def test_every_token_has_its_version_and_none_is_too_old(run):
    assert len(run.tokens) == 2 * 200
    num_mixed = dict.fromkeys(MODES, 0)
    for version, versions in run.tokens:
        assert version - 2 <= int(versions.min()) <= int(versions.max()) <= version
        assert versions.tolist() == sorted(versions.tolist())
        for newer in versions.unique().tolist()[1:]:
            num_mixed[MODES[newer % len(MODES)]] += 1
    assert num_mixed["keep"] > 0, "no completion went on after a refit"
    assert num_mixed["recompute"] > 0
    assert num_mixed["finish"] == num_mixed["abort"] == 0
    warnings = run.folder / "warnings.jsonl"
    assert not warnings.exists() or "mismatch" not in warnings.read_text()


def test_a_replica_that_is_killed_and_a_resume_lose_and_repeat_no_sample(run):
    assert sum(record["train/replaced_generators"] for record in run.records) == 1
    samples = [
        orjson.loads(line)["sample"]
        for step in range(1, 11)
        for line in (run.folder / f"samples/step_{step}.jsonl").read_bytes().splitlines()
    ]
    assert len(samples) == len(set(samples)) == 200
