"""A rank's state beside its checkpoint: with it a rank resumes bit-exactly, without any item of it it does not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lucidrl.algorithms.saver import restore_processes
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import TrainingError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.policy import Policy
from lucidrl.models.policy.worker import PolicyWorker
from lucidrl.utils.random_state import random_state, seed_everything

CONFIG = PolicyConfig(
    model_name="embedded-untrained",
    optimizer={"name": "tests.faults.drawing.NoisyAdamW", "kwargs": {"lr": 1e-3}},
    generation={"max_new_tokens": 4},
    max_nonfinite_steps=2,
)
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


class BrokenLoss(NLLLoss):
    """A loss with NaN gradients."""

    def __call__(self, *args: Any) -> Any:
        loss, metrics = super().__call__(*args)
        return loss * torch.nan, metrics


def rows() -> BatchedDataDict[Any]:
    columns = {"input_ids": IDS, "input_lengths": torch.tensor([4, 4])}
    return BatchedDataDict({**columns, "token_mask": torch.ones(2, 4), "sample_mask": torch.ones(2)})


def second_half(worker: PolicyWorker) -> list[Any]:
    """Return what a rank computes after its state was saved."""
    completions = worker.generate(BatchedDataDict({"input_ids": IDS, "input_lengths": torch.tensor([4, 4])}))
    try:
        worker.train(rows(), BrokenLoss())
        ending = "went on"
    except TrainingError as error:
        ending = str(error)
    losses = [worker.train(rows(), NLLLoss())["global_loss"].tolist() for _ in range(2)]
    return [completions["output_ids"].tolist(), ending, losses]


def with_and_without_each_item(folder: Path) -> dict[str, Any]:
    """Results of the second half by the item that was removed from the state; "" removes none."""
    worker = DTensorPolicyWorker(CONFIG, embedded_tokenizer(), seed=1)
    fresh = worker.state_dict()
    worker.generate(BatchedDataDict({"input_ids": IDS, "input_lengths": torch.tensor([4, 4])}))
    worker.train(rows(), NLLLoss())
    worker.train(rows(), BrokenLoss())
    state = worker.state_dict()
    worker.save_checkpoint(f"{folder}/policy", f"{folder}/optimizer")
    outcomes = {"uninterrupted": second_half(worker)}
    for item in ["", *(path for path in _paths(state) if path != "process/num_threads")]:
        resumed = DTensorPolicyWorker(CONFIG, embedded_tokenizer(), seed=1)
        resumed.load_checkpoint(f"{folder}/policy", f"{folder}/optimizer")
        resumed.load_state_dict(_with_fresh(state, fresh, item))
        outcomes[item] = second_half(resumed)
    return outcomes


def _paths(state: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in state.items():
        is_group = isinstance(value, dict) and name in ("process", "random")
        found += _paths(value, f"{prefix}{name}/") if is_group else [f"{prefix}{name}"]
    return found


def _with_fresh(state: dict[str, Any], fresh: dict[str, Any], path: str) -> dict[str, Any]:
    result = copy.deepcopy(state)
    place, other = result, fresh
    *parents, last = path.split("/")
    for parent in parents:
        place, other = place[parent], other[parent]
    if last:
        assert place[last] != other[last], f"{path} has not changed, so that leaving it out shows nothing"
        place[last] = other[last]
    return result


@pytest.mark.slow
def test_every_item_of_a_ranks_state_is_read(two_ranks, tmp_path):
    for outcomes in two_ranks(lambda: with_and_without_each_item(tmp_path)):
        assert outcomes.keys() > {"", "nonfinite_steps_in_a_row", "generator_calls", "process/random/torch"}
        assert outcomes[""] == outcomes["uninterrupted"]
        assert [item for item, outcome in outcomes.items() if item and outcome == outcomes[""]] == ["uninterrupted"]


def test_a_single_worker_leaves_the_random_state_to_its_process(tmp_path):
    outcomes = with_and_without_each_item(tmp_path)
    assert set(outcomes) == {"uninterrupted", "", "nonfinite_steps_in_a_row", "generator_calls"}
    for item in ("nonfinite_steps_in_a_row", "generator_calls"):
        assert outcomes[item][:2] != outcomes["uninterrupted"][:2]
    assert outcomes[""][:2] == outcomes["uninterrupted"][:2]


@pytest.mark.parametrize(
    ("parallel", "are_equal"), [({}, False), ({"tensor_parallel_size": 2}, True), ({"context_parallel_size": 2}, True)]
)
def test_ranks_sample_the_same_only_with_the_same_rows(two_ranks, parallel, are_equal):
    def states() -> Any:
        packing = {"enabled": not parallel}
        config = PolicyConfig(dtensor_cfg=parallel, sequence_packing=packing)
        return DTensorPolicyWorker(config, embedded_tokenizer(), seed=1).state_dict()["process"]["random"]

    first, second = two_ranks(states)
    assert all((first[name] == second[name]) == are_equal for name in ("python", "numpy", "torch"))


def test_another_layout_restores_counters_but_not_random_states():
    with Policy(CONFIG, embedded_tokenizer(), seed=1) as policy:
        seed_everything(7)
        process = {"random": random_state(), "num_threads": 2}
        rank = {"generator_calls": 5, "nonfinite_steps_in_a_row": 1, "process": process}
        seed_everything(8)
        before, said = random_state(), []
        saved = {"layout": "DTensorPolicyWorker dp=2 x cp=1 x tp=1 on CPU", "ranks": [rank, rank]}
        restore_processes(policy, {"driver": {"random": before, "num_threads": 2}, "policy": saved}, said.append)
        assert policy.state_dict()["ranks"] == [{"generator_calls": 5, "nonfinite_steps_in_a_row": 1}]
        assert random_state() == before
    assert [message.partition(":")[0] for message in said] == [
        "resuming on another layout (DTensorPolicyWorker dp=1 x cp=1 x tp=1 on CPU, "
        "saved on DTensorPolicyWorker dp=2 x cp=1 x tp=1 on CPU)"
    ]
    assert "the ranks' random states are new" in said[0]
