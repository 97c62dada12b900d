"""Policies that compute common tokens once train and score like policies that compute every row alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.worker import PolicyWorker
from tests.float64 import float64_throughout
from tests.tiers import slow_except

SGD = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}}}
BATCHINGS: dict[str, dict[str, Any]] = {
    "fixed": {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 4, "logprob_batch_size": 8},
    "dynamic": {
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 60, "logprob_mb_tokens": 100},
    },
    "packed": {"sequence_packing": {"train_mb_tokens": 60, "logprob_mb_tokens": 100}},
}
LAYOUTS: dict[str, tuple[type[PolicyWorker], dict[str, Any]]] = {
    "dp2": (DTensorPolicyWorker, {}),
    "tp2": (DTensorPolicyWorker, {"tensor_parallel_size": 2}),
    "fsdp1": (FSDP1PolicyWorker, {"enabled": False}),
    "dp2, activation checkpointing": (DTensorPolicyWorker, {"activation_checkpointing": True}),
    "cp2": (DTensorPolicyWorker, {"context_parallel_size": 2}),
    "sp2": (DTensorPolicyWorker, {"tensor_parallel_size": 2, "sequence_parallel": True}),
}
WITHOUT_SHARING = ("cp2", "sp2")


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Four prompts with four samples each, of different lengths; two samples are equal."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 90, (length,), generator=draw) for length in (12, 10, 12, 15)]
    new_tokens = [6, 3, 1, 8, 4, 4, 7, 2, 5, 6, 8, 3, 1, 2, 7, 5]
    completions = [torch.randint(2, 90, (new,), generator=draw) for new in new_tokens]
    samples = [torch.cat((prompts[n // 4], completion)) for n, completion in enumerate(completions)]
    samples[5] = samples[4]
    lengths = torch.tensor(list(map(len, samples)))
    prompt_lengths = torch.tensor([len(prompts[n // 4]) for n in range(len(samples))])
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    position = torch.arange(ids.shape[1])
    mask = (position >= prompt_lengths[:, None]) & (position < lengths[:, None])
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": mask.long(),
        "sample_mask": torch.ones(len(samples)),
        "advantages": torch.randn(len(samples), generator=draw),
        "generation_logprobs": -torch.rand(ids.shape, generator=draw),
    }


def two_steps(kind: type[PolicyWorker], options: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Score and train this rank's rows twice; return everything that sharing could change."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    plans = logging.getLogger("lucidrl.models.policy.row_plans")
    plans.addHandler(handler)
    plans.setLevel(logging.INFO)
    try:
        worker = kind(PolicyConfig(model_name="embedded", precision="float64", **SGD, **options), embedded_tokenizer())
    finally:
        plans.removeHandler(handler)
    data, layout = BatchedDataDict(rows), worker.mesh.layout
    share = data.size // layout.dp
    first = layout.data_rank(worker.rank) * share
    own = data.slice(first, first + share)
    loss_fn = ClippedPGLoss(ClippedPGConfig(entropy_coefficient=0.01, kl_coefficient=0.1), on_policy=False)
    with float64_throughout():
        own["prev_logprobs"] = worker.get_logprobs(own)["logprobs"]
        own["reference_policy_logprobs"] = worker.get_reference_policy_logprobs(own)["reference_logprobs"]
        before = worker.model.num_computed_tokens
        results = [worker.train(own, loss_fn) for _ in range(2)]
    metrics = results[-1]["metrics"]
    return {
        "logprobs": own["prev_logprobs"],
        "reference": own["reference_policy_logprobs"],
        "losses": torch.cat([result["global_loss"] for result in results]),
        "grad_norms": torch.stack([result["grad_norm"] for result in results]),
        "weights": {name: tensor.clone() for name, tensor in worker.sharding.full_weights()},
        "row_tokens": metrics["row_tokens"],
        "computed_tokens": metrics["computed_tokens"],
        "trained_tokens": worker.model.num_computed_tokens - before,
        "messages": messages,
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("logprobs", "reference", "losses", "grad_norms"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weights, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("name", BATCHINGS)
def test_one_rank(rows, name):
    alone = two_steps(DTensorPolicyWorker, {"share_prefixes": False, **BATCHINGS[name]}, rows)
    shared = two_steps(DTensorPolicyWorker, BATCHINGS[name], rows)
    assert_equal(shared, alone)
    assert shared["computed_tokens"] < 0.6 * shared["row_tokens"] <= 0.6 * alone["computed_tokens"]
    assert shared["trained_tokens"] == 2 * shared["computed_tokens"]
    assert not shared["messages"]


@pytest.mark.parametrize(
    "case",
    slow_except(
        [
            (layout, name)
            for layout in LAYOUTS
            for name in BATCHINGS
            if layout not in WITHOUT_SHARING or name == "fixed"
        ],
        ("tp2", "packed"),
    ),
    ids=lambda case: "-".join(case),
)
def test_two_ranks(two_ranks, rows, case):
    layout, name = case
    kind, parallel = LAYOUTS[layout]
    options = {"dtensor_cfg": parallel, **BATCHINGS[name]}
    alone = two_ranks(two_steps, kind, {"share_prefixes": False, **options}, rows)
    shared = two_ranks(two_steps, kind, options, rows)
    for with_sharing, without in zip(shared, alone, strict=True):
        assert_equal(with_sharing, without)
    if layout in WITHOUT_SHARING:
        assert shared[0]["computed_tokens"] == alone[0]["computed_tokens"]
        assert len(shared[0]["messages"]) == 1
        assert "share_prefixes has no effect with context or sequence parallelism" in shared[0]["messages"][0]
        assert not shared[1]["messages"]
    else:
        assert shared[0]["computed_tokens"] < 0.6 * shared[0]["row_tokens"]
        assert not shared[0]["messages"]


def test_half_precision(rows):
    options = {"model_name": "embedded", "precision": "bfloat16", "sequence_packing": {"train_mb_tokens": 100}}
    found, results = [], []
    for share in (False, True):
        worker = DTensorPolicyWorker(PolicyConfig(share_prefixes=share, **options), embedded_tokenizer())
        data = BatchedDataDict(rows)
        data["prev_logprobs"] = worker.get_logprobs(data)["logprobs"]
        found.append(data["prev_logprobs"])
        results.append(worker.train(data, ClippedPGLoss(ClippedPGConfig(), on_policy=False)))
    assert (found[0] - found[1]).abs().mean() < 0.02
    alone, shared = results
    assert shared["metrics"]["computed_tokens"] < 0.6 * alone["metrics"]["computed_tokens"]
    assert float(shared["grad_norm"]) == pytest.approx(float(alone["grad_norm"]), rel=0.05)
