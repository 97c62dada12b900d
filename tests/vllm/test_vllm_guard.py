"""The guard finds every injected fault of a replica of vLLM within one step, names it, and is silent otherwise."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation import separate
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from tests.unit.models.policy.test_mismatch_guard import GuardedSteps, check_fault
from tests.vllm.faulty_vllm import FAULTS, FaultyVllm
from tests.vllm.vllm_cases import ROUNDING, config_of, needs_vllm

pytestmark = needs_vllm
NO_TRAINING: dict[str, Any] = {"init_optimizer": False, "init_reference_model": False}


@pytest.fixture
def start(monkeypatch, caplog, tmp_path):
    """Return a function of a config that starts a policy and a replica with faults."""
    monkeypatch.setitem(separate.ENGINES, "vllm", FaultyVllm)
    caplog.set_level(logging.WARNING)
    opened: list[Any] = []

    def started(config: PolicyConfig) -> GuardedSteps:
        torch.manual_seed(0)
        policy = Policy(config, embedded_tokenizer(), **NO_TRAINING)
        opened.append(policy)
        generator = SeparateGenerator(policy, config, embedded_tokenizer())
        opened.append(generator)
        generator.update_weights(0)
        policy.group.run_all("save_checkpoint", str(tmp_path))
        return GuardedSteps(policy, generator, config, str(tmp_path), caplog)

    yield started
    for part in reversed(opened):
        part.shutdown()


def test_each_fault_is_found_and_named_in_the_step_in_which_it_starts(start):
    steps = start(config_of(max_new_tokens=8, temperature=0.7, top_p=0.8))
    for _ in range(10):
        steps.restore_weights()
        for fault in FAULTS:
            check_fault(steps, fault)


def test_merged_adapters_arrive_and_their_gap_is_reported(start):
    config = config_of(max_new_tokens=8, temperature=0.7)
    steps = start(config.model_copy(update={"lora": PolicyConfig(lora={"rank": 4}).lora}))
    for _ in range(3):
        assert steps.step() == []
        assert steps.generator.guard.difference < ROUNDING
        assert 0 < steps.guard.metrics["merge_gap"] < ROUNDING
