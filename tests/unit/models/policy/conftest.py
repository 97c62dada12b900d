"""Workers on tiny models, and all ways to split a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.worker import PolicyWorker

BATCHINGS: dict[str, dict[str, Any]] = {
    "fixed_1": {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 1, "logprob_batch_size": 1},
    "fixed_3": {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 3, "logprob_batch_size": 3},
    "fixed_all": {"sequence_packing": {"enabled": False}},
    "dynamic": {
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": 26,
            "logprob_mb_tokens": 30,
            "sequence_length_round": 4,
        },
    },
    "packed": {"sequence_packing": {"train_mb_tokens": 20, "logprob_mb_tokens": 25}},
    "packed_all": {},
}


@pytest.fixture
def make_worker(tiny_model, tokenizer) -> Callable[..., PolicyWorker]:
    """A worker of the named architecture; other arguments are fields of its config, or of the worker."""
    own_arguments = ("weights_path", "optimizer_path", "init_optimizer", "init_reference_model", "seed")

    def make(architecture: str = "llama", **options: Any) -> PolicyWorker:
        arguments = {name: options.pop(name) for name in own_arguments if name in options}
        name = architecture if architecture.startswith("embedded") else tiny_model(architecture)
        return DTensorPolicyWorker(PolicyConfig(model_name=name, **options), tokenizer, **arguments)

    return make


@pytest.fixture(params=BATCHINGS)
def batching(request) -> dict[str, Any]:
    """Config fields of each way to split a batch into micro-batches."""
    return BATCHINGS[request.param]


@pytest.fixture
def weights_of() -> Callable[[PolicyWorker], dict[str, torch.Tensor]]:
    """A copy of a worker's weights."""
    return lambda worker: {name: value.detach().clone() for name, value in worker.model.model.named_parameters()}
