"""A distillation step does not depend on micro-batches, packing or ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.distillation import DistillationLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from tests.float64 import float64_throughout
from tests.tiers import slow_except
from tests.unit.models.policy.test_ranks import DYNAMIC, FIXED, PACKED, SGD, gathered_weights, own_rows

TOLERANCE = 1e-9
TOP_K = 5
CUTS = {
    "rows_of_1": {**FIXED, "train_micro_batch_size": 1},
    "rows_of_8": {**FIXED, "train_micro_batch_size": 8},
    "dynamic": DYNAMIC,
    "packed": PACKED,
    "not_shared": {**PACKED, "share_prefixes": False},
}
LAYOUTS = {"dp2": {}, "tp2": {"tensor_parallel_size": 2}, "cp2": {"context_parallel_size": 2}}


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([19, 7, 12, 16, 5, 18, 11, 9])
    is_token = torch.arange(19) < lengths[:, None]
    ids = torch.randint(2, 90, (8, 19), generator=generator)
    ids[1::2, :5] = ids[::2, :5]  # rows of a group share their prompt and their first token
    teacher = torch.log_softmax(2 * torch.randn(8, 19, 99, generator=generator, dtype=torch.float64), dim=-1)
    top, candidates = teacher.topk(TOP_K)
    others = teacher.scatter(-1, candidates, -torch.inf).logsumexp(-1, keepdim=True)
    return {
        "input_ids": ids * is_token,
        "input_lengths": lengths,
        "token_mask": (is_token & (torch.arange(19) >= 4)).long(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1]),
        "advantages": torch.randn(8, generator=generator, dtype=torch.float64),
        "teacher_logprobs": teacher.gather(-1, ids[..., None])[..., 0],
        "candidate_ids": candidates.int(),
        "teacher_candidates": torch.cat([top, others], dim=-1),
        "idx": [f"row {number}" for number in range(8)],
    }


def two_steps(options: dict[str, Any], divergence: str, entropy: float, rows: dict[str, Any]) -> dict[str, Any]:
    config = PolicyConfig(**{"model_name": "embedded", "precision": "float64", **SGD, **options})
    worker = DTensorPolicyWorker(config, embedded_tokenizer(), seed=1)
    loss_fn = DistillationLoss(ClippedPGConfig(entropy_coefficient=entropy), divergence, 0.8, on_policy=True)
    own = own_rows(worker, rows)
    # Rows that share tokens are computed otherwise, equal in exact arithmetic. Ranks keep position tables in float32.
    with float64_throughout() if config.share_prefixes else nullcontext():
        results = [worker.train(own, loss_fn) for _ in range(2)]
    counted = ("row_tokens", "computed_tokens")
    return {
        "losses": torch.cat([result["global_loss"] for result in results]),
        "grad_norms": torch.stack([result["grad_norm"] for result in results]),
        "metrics": {name: value for name, value in results[-1]["metrics"].items() if name not in counted},
        "weights": gathered_weights(worker),
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("losses", "grad_norms"):
        torch.testing.assert_close(found[name], expected[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=100 * TOLERANCE, abs=TOLERANCE)
    for name, weights in found["weights"].items():
        torch.testing.assert_close(weights, expected["weights"][name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.fixture(scope="module")
def whole(rows):
    """Return a cached function: the step in micro-batches of two rows, on one rank."""

    @cache
    def run(divergence: str, entropy: float, shares: bool = True) -> dict[str, Any]:
        return two_steps({**FIXED, "share_prefixes": shares}, divergence, entropy, rows)

    return run


@pytest.mark.parametrize("cut", slow_except(CUTS, "rows_of_8", "packed"))
@pytest.mark.parametrize(("divergence", "entropy"), [("sampled", 0.0), ("top_k", 0.0), ("top_k", 0.01)])
def test_cuts_of_rows_train_alike(rows, whole, cut, divergence, entropy):
    shares = CUTS[cut].get("share_prefixes", True)
    assert_equal(two_steps(CUTS[cut], divergence, entropy, rows), whole(divergence, entropy, shares))


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "dp2", "tp2"))
@pytest.mark.parametrize("divergence", slow_except(["sampled", "top_k"], "top_k"))
def test_two_ranks_train_as_one(two_ranks, rows, whole, layout, divergence):
    options = {**FIXED, "share_prefixes": False, "dtensor_cfg": LAYOUTS[layout]}
    for found in two_ranks(two_steps, options, divergence, 0.0, rows):
        assert_equal(found, whole(divergence, 0.0, shares=False))
