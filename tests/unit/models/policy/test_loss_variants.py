"""Every variant trains to the same weights however its rows are cut: six ways on one rank, six on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lucidrl.algorithms.config import GRPOConfig
from lucidrl.algorithms.variants import Variant
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.importance import importance_mask
from lucidrl.losses.interfaces import IMPORTANCE_MASK
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker

OPTIONS = {
    "model_name": "embedded",
    "precision": "float64",
    "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}},
    "max_grad_norm": 1e9,
}
FIXED: dict[str, Any] = {"sequence_packing": {"enabled": False}}
CUTS: dict[str, dict[str, Any]] = {
    "fixed_1": {**FIXED, "train_micro_batch_size": 1},
    "fixed_3": {**FIXED, "train_micro_batch_size": 3},
    "fixed_all": {**FIXED, "train_micro_batch_size": 8},
    "dynamic": {**FIXED, "dynamic_batching": {"enabled": True, "train_mb_tokens": 26, "logprob_mb_tokens": 30}},
    "packed": {"sequence_packing": {"train_mb_tokens": 24, "logprob_mb_tokens": 24}},
    "packed_all": {"share_prefixes": False},
}


def make_rows(variant: Variant) -> dict[str, Any]:
    """Eight rows, a little off policy; one is not valid, and importance weights exclude tokens of others."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([12, 7, 10, 11, 5, 12, 9, 8])
    mask = (torch.arange(12) >= 3) & (torch.arange(12) < lengths[:, None])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = {
        "input_ids": torch.randint(2, 90, (8, 12), generator=generator) * (torch.arange(12) < lengths[:, None]),
        "input_lengths": lengths,
        "token_mask": mask.long(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1]),
        "advantages": normal(8, 12) if variant is Variant.REINFORCE_PP else normal(8),
    }
    worker = DTensorPolicyWorker(PolicyConfig(**OPTIONS), embedded_tokenizer(), seed=1)
    now = worker.get_logprobs(BatchedDataDict(rows))["logprobs"]
    off_policy = 1e-4 if variant is Variant.GSPO else 0.05
    rows["prev_logprobs"] = now + off_policy * normal(8, 12)
    rows["reference_policy_logprobs"] = now + 0.2 * normal(8, 12)
    rows["generation_logprobs"] = rows["prev_logprobs"] + 0.2 * normal(8, 12)
    return rows


def trained(variant: Variant, cut: str, rows: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loss and weights after one update on this rank's share of the rows."""
    worker = DTensorPolicyWorker(PolicyConfig(**OPTIONS, **CUTS[cut]), embedded_tokenizer(), seed=1)
    correction = {"importance_correction": "mask", "importance_cap": 1.3}
    config = GRPOConfig(variant=variant, loss=correction).with_constant_length(9).loss
    rows = {**rows, IMPORTANCE_MASK: importance_mask(config, rows)}
    layout = worker.mesh.layout
    share = 8 // layout.dp
    start = layout.data_rank(worker.rank) * share
    result = worker.train(BatchedDataDict(rows).slice(start, start + share), ClippedPGLoss(config))
    weights = {name: tensor.clone() for name, tensor in worker.sharding.full_weights()}
    return {"loss": result["global_loss"], "grad_norm": result["grad_norm"], **weights}


@pytest.mark.slow
@pytest.mark.parametrize("variant", Variant)
def test_twelve_cuts_give_the_same_loss_and_weights(two_ranks, variant):
    rows = make_rows(variant)
    whole = trained(variant, "fixed_all", rows)
    assert whole["grad_norm"] > 1e-3
    for cut in CUTS:
        for found in (trained(variant, cut, rows), *two_ranks(trained, variant, cut, rows)):
            torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9, msg=lambda text, cut=cut: f"{cut}: {text}")
