"""Many ranks compute what one rank computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lucidrl.algorithms.config import ClippedPGConfig
from lucidrl.algorithms.losses import ClippedPGLoss
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.worker import PolicyWorker

SGD = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}}, "max_grad_norm": 0.7}
FIXED = {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 2, "logprob_batch_size": 3}
DYNAMIC = {
    "sequence_packing": {"enabled": False},
    "dynamic_batching": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 60},
}
PACKED = {"sequence_packing": {"train_mb_tokens": 30, "logprob_mb_tokens": 45}}
KINDS = [DTensorPolicyWorker, FSDP1PolicyWorker]
TOLERANCE = {"float64": 1e-9, "float32": 5e-5}


def three_steps(kind: type[PolicyWorker], options: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Train this rank's share of the rows three times; what that gave, whole, on every rank."""
    worker = kind(PolicyConfig(**options), embedded_tokenizer(), seed=1)
    layout, data = worker.mesh.layout, BatchedDataDict(rows)
    share = data.size // layout.dp
    start = layout.data_rank(worker.rank) * share
    own = data.slice(start, start + share)
    loss_fn = ClippedPGLoss(ClippedPGConfig(entropy_coefficient=0.01, kl_coefficient=0.1), on_policy=False)
    scored = {"before": worker.get_logprobs(own)["logprobs"]}
    own["prev_logprobs"] = scored["before"] - 0.1
    own["reference_policy_logprobs"] = worker.get_reference_policy_logprobs(own)["reference_logprobs"]
    results = [worker.train(own, loss_fn) for _ in range(3)]
    scored["after"] = worker.get_logprobs(own)["logprobs"]
    scored["reference"] = worker.get_reference_policy_logprobs(own)["reference_logprobs"]
    return {
        "losses": torch.cat([result["global_loss"] for result in results]),
        "grad_norms": torch.stack([result["grad_norm"] for result in results]),
        "metrics": results[-1]["metrics"],
        "weights": {name: tensor.clone() for name, tensor in worker.sharding.full_weights()},
        "data_rank": layout.data_rank(worker.rank),
        **scored,
    }


def assert_equal_to_one_rank(results: list[dict[str, Any]], one: dict[str, Any], tolerance: float) -> None:
    for result in results:
        for name in ("losses", "grad_norms"):
            torch.testing.assert_close(result[name], one[name], rtol=tolerance, atol=tolerance)
        assert result["metrics"] == pytest.approx(one["metrics"], rel=100 * tolerance, abs=tolerance)
        assert result["weights"].keys() == one["weights"].keys()
        for name, weights in result["weights"].items():
            torch.testing.assert_close(weights, one["weights"][name], rtol=tolerance, atol=tolerance, msg=name)
        for name in ("before", "after", "reference"):
            rows = len(result[name])
            expected = one[name][result["data_rank"] * rows : (result["data_rank"] + 1) * rows]
            torch.testing.assert_close(result[name], expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([19, 7, 12, 16, 5, 18, 11, 9])
    mask = (torch.arange(19) >= 3) & (torch.arange(19) < lengths[:, None])
    return {
        "input_ids": torch.randint(2, 90, (8, 19), generator=generator) * (torch.arange(19) < lengths[:, None]),
        "input_lengths": lengths,
        "token_mask": mask.long(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1]),
        "advantages": torch.randn(8, generator=generator),
        "generation_logprobs": -torch.rand(8, 19, generator=generator),
        "idx": [f"row {number}" for number in range(8)],
    }


@pytest.fixture(scope="module")
def one_rank(rows):
    """What one rank gives with some options; remembered."""
    known: dict[str, dict[str, Any]] = {}

    def run(options: dict[str, Any]) -> dict[str, Any]:
        alone = {**options, "dtensor_cfg": {}}
        if repr(alone) not in known:
            known[repr(alone)] = three_steps(DTensorPolicyWorker, alone, rows)
        return known[repr(alone)]

    return run


def check(ranks, one_rank, rows, precision="float64", kind=DTensorPolicyWorker, **options):
    options = {"model_name": "embedded", "precision": precision, **SGD, **options}
    assert_equal_to_one_rank(ranks(three_steps, kind, options, rows), one_rank(options), TOLERANCE[precision])


@pytest.mark.parametrize("batching", [FIXED, DYNAMIC, PACKED], ids=["fixed", "dynamic", "packed"])
@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_data_parallel(two_ranks, one_rank, rows, kind, batching, precision):
    check(two_ranks, one_rank, rows, precision, kind, **batching)


LAYOUTS = {
    "tp2": {"tensor_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "tp2_sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "offload": {"cpu_offload": True},
    "checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(two_ranks, one_rank, rows, layout):
    check(two_ranks, one_rank, rows, **FIXED, dtensor_cfg=LAYOUTS[layout])


FOUR = {
    "dp4": {},
    "dp2_tp2": {"tensor_parallel_size": 2},
    "cp2_tp2": {"context_parallel_size": 2, "tensor_parallel_size": 2},
    "cp2_dp2": {"context_parallel_size": 2},
    "cp2_tp2_sequence": {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks(four_ranks, one_rank, rows, layout):
    check(four_ranks, one_rank, rows, **FIXED, dtensor_cfg=FOUR[layout])


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_float32_weights_and_learns_as_one_rank_does(two_ranks, one_rank, rows, precision):
    options = {"model_name": "embedded", "precision": precision, **SGD, **FIXED}
    alone = one_rank(options)
    for result in two_ranks(three_steps, DTensorPolicyWorker, options, rows):
        # The first step only: rounding differs, and the second one starts from where it led.
        torch.testing.assert_close(result["losses"][0], alone["losses"][0], rtol=0.05, atol=0.02)
        torch.testing.assert_close(result["grad_norms"][0], alone["grad_norms"][0], rtol=0.05, atol=0.02)
        assert {weights.dtype for weights in result["weights"].values()} == {torch.float32}


ARCHITECTURES = ["llama_untied", "qwen2", "qwen3", "mistral_sliding", "gemma2_sliding_capped", "phi_head_bias"]


@pytest.mark.parametrize("parallel", ["dp2", "tp2", "cp2"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(two_ranks, one_rank, rows, tiny_model, architecture, parallel):
    layout = {"dp2": {}, **LAYOUTS}[parallel]
    check(two_ranks, one_rank, rows, **FIXED, model_name=tiny_model(architecture), dtensor_cfg=layout)


@pytest.mark.parametrize("layout", ["offload", "checkpointing"])
def test_fsdp1_layouts(two_ranks, one_rank, rows, layout):
    check(two_ranks, one_rank, rows, kind=FSDP1PolicyWorker, **FIXED, dtensor_cfg=LAYOUTS[layout])


@pytest.mark.parametrize("architecture", ["llama_untied", "phi_head_bias", "gpt2_learned_positions"])
def test_fsdp1_architectures(two_ranks, one_rank, rows, tiny_model, architecture):
    check(two_ranks, one_rank, rows, kind=FSDP1PolicyWorker, **PACKED, model_name=tiny_model(architecture))


def test_fsdp1_on_four_ranks(four_ranks, one_rank, rows):
    check(four_ranks, one_rank, rows, kind=FSDP1PolicyWorker, **FIXED)
