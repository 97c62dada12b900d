"""Muon: the orthogonalised update, which weights get it, and equal updates on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import AutoModelForCausalLM

from lucidrl.checkpoint.tensors import open_tensors
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.muon import Muon, matrix_names, newton_schulz
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.parameter_groups import WeightInfo
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker

Rows = dict[str, Any]
TP = {"dtensor_cfg": {"tensor_parallel_size": 2}}


def muon(lr: float = 1e-3, **fields: Any) -> PolicyConfig:
    kwargs = {"lr": lr, "weight_decay": 0.1}
    return PolicyConfig(optimizer={"name": "muon", "kwargs": kwargs, **fields.pop("optimizer", {})}, **fields)


def apply(matrix: torch.Tensor, function: Any) -> torch.Tensor:
    return function(matrix)


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12), (1, 9)])
def test_newton_schulz_orthogonalises_like_the_singular_value_decomposition(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(newton_schulz(matrix, 5), u @ torch.diag(s) @ vh, rtol=0, atol=1e-9)
    in_float32 = newton_schulz(matrix.float(), 5)
    torch.testing.assert_close(in_float32, (u @ torch.diag(s) @ vh).float(), rtol=0, atol=1e-5)
    assert s.min() > 0.65
    assert s.max() < 1.25
    # As close to U V^T as these singular values allow.
    error = torch.linalg.matrix_norm(in_float32 - (u @ vh).float(), 2)
    assert error == pytest.approx(float((s - 1).abs().max()), abs=1e-4)


def test_half_precision_is_computed_in_float32():
    matrix = torch.randn(24, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = newton_schulz(matrix.float(), 5)
    assert torch.equal(newton_schulz(matrix, 5), expected.bfloat16())


def test_matrices_move_as_with_torch_muon_and_the_rest_as_with_adamw():
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(12, 20, generator=generator), torch.randn(20, generator=generator)]
    gradients = [[torch.randn(x.shape, generator=generator) for x in start] for _ in range(4)]
    settings = {"lr": 0.02, "weight_decay": 0.1}
    ours, theirs = ([x.clone().requires_grad_() for x in start] for _ in range(2))
    optimizers = [
        Muon({ours[0]: apply}, ours, **settings),
        torch.optim.Muon(theirs[:1], **settings, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[1:], **settings, fused=True),
    ]
    for of_step in gradients:
        for weights in (ours, theirs):
            for weight, gradient in zip(weights, of_step, strict=True):
                weight.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours[1], theirs[1])
    moved, expected = (weights[0].detach() - start[0] for weights in (ours, theirs))
    # torch orthogonalises in bfloat16.
    torch.testing.assert_close(moved, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_an_update_has_the_size_of_adamws():
    weight = nn.Parameter(torch.zeros(64, 256))
    optimizer = Muon({weight: apply}, [weight], lr=1.0, weight_decay=0.0)
    weight.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)


@pytest.mark.parametrize("architecture", ["llama", "llama_untied", "gpt2_learned_positions"])
def test_embeddings_head_norms_and_biases_are_no_matrices(tiny_model, architecture):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(architecture))
    names, shapes = matrix_names(model), {name: list(p.shape) for name, p in model.named_parameters()}
    layer = "h.0." if architecture.startswith("gpt2") else "layers.0."
    assert {name for name in names if layer in name} == {
        name for name, shape in shapes.items() if layer in name and len(shape) == 2
    }
    assert not {name for name in names if "embed" in name or "head" in name or "wte" in name or "wpe" in name}
    assert all(len(shapes[name]) == 2 for name in names)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"momentum": 1.0}, r"policy\.optimizer\.kwargs=.*momentum=1.0 is not at least 0 and below 1"),
        ({"ns_steps": 0}, r"ns_steps=0 is less than 1"),
        ({"nesterow": True}, r"unknown key policy\.optimizer\.kwargs\.nesterow; did you mean .*nesterov"),
        ({"matrices": {}}, r"unknown key policy\.optimizer\.kwargs\.matrices"),
    ],
)
def test_wrong_arguments_are_refused(kwargs, message):
    config = PolicyConfig(optimizer={"name": "muon", "kwargs": kwargs})
    with pytest.raises(ConfigError, match=message):
        PolicyOptimizer([nn.Parameter(torch.ones(2, 2))], config, weights=[WeightInfo("w", apply)])


@pytest.mark.parametrize("name", ["muno", "AdamW"])
def test_a_name_without_a_path_is_muon_or_refused(name):
    with pytest.raises(ValidationError, match=f"'{name}' is not an optimizer; set muon, or the import path of an opt"):
        PolicyConfig(optimizer={"name": name, "kwargs": {"lr": 0.1}})


def test_fsdp1_is_refused_on_several_ranks():
    config = muon(dtensor_cfg={"enabled": False})
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.name=muon needs separate weights, but FSDP1"):
        FSDP1PolicyWorker.layout_of(config, 2)
    assert FSDP1PolicyWorker.layout_of(config, 1).size == 1


# Several ranks


def worker_of(**fields: Any) -> DTensorPolicyWorker:
    groups = [{"pattern": "*norm*", "weight_decay": 0.0}, {"pattern": "*layers.0.*", "lr": 3e-3}]
    config = muon(model_name="embedded", optimizer={"groups": groups}, **fields)
    return DTensorPolicyWorker(config, embedded_tokenizer(), init_reference_model=False)


def train(worker: DTensorPolicyWorker, rows: Rows, num_steps: int) -> dict[str, torch.Tensor]:
    data, layout = BatchedDataDict(rows), worker.mesh.layout
    share = data.size // layout.dp
    start = layout.data_rank(worker.rank) * share
    for _ in range(num_steps):
        worker.train(data.slice(start, start + share), NLLLoss())
    return {name: weight.clone() for name, weight in worker.sharding.full_weights()}


def trained(rows: Rows, layouts: list[dict[str, Any]], precision: str) -> list[dict[str, torch.Tensor]]:
    return [train(worker_of(precision=precision, **layout), rows, 3) for layout in layouts]


@pytest.mark.parametrize(
    ("precision", "atol"), [("float32", 1e-6), pytest.param("float64", 1e-12, marks=pytest.mark.slow)]
)
def test_two_ranks_make_the_updates_of_one(two_ranks, make_rows, precision, atol):
    rows = make_rows().get_dict()
    (expected,) = trained(rows, [{}], precision)
    before = dict(worker_of(precision=precision).sharding.full_weights())
    assert max(float((expected[name] - before[name]).abs().max()) for name in expected) > 1e-3
    for of_rank in two_ranks(trained, rows, [{}, TP], precision):
        for layout, found in zip(("dp2", "tp2"), of_rank, strict=True):
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, rtol=0, atol=atol, msg=f"{layout} {name}")


@pytest.mark.slow
def test_four_ranks_make_the_updates_of_one(four_ranks, make_rows):
    rows = make_rows().get_dict()
    (expected,) = trained(rows, [{}], "float64")
    for (found,) in four_ranks(trained, rows, [TP], "float64"):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12, msg=name)


def save_after(rows: Rows, folder: str, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train two steps, save, train two more; return the weights."""
    worker = worker_of(precision="bfloat16", **layout)
    train(worker, rows, 2)
    worker.save_checkpoint(f"{folder}/weights", f"{folder}/optimizer")
    return train(worker, rows, 2)


def resume(rows: Rows, folder: str, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    worker = worker_of(precision="bfloat16", **layout)
    worker.load_checkpoint(f"{folder}/weights", f"{folder}/optimizer")
    return train(worker, rows, 2)


def test_a_resume_is_bit_exact_and_saves_one_moment_per_matrix(make_rows, tmp_path):
    rows = make_rows().get_dict()
    expected = save_after(rows, str(tmp_path), {})
    found = resume(rows, str(tmp_path), {})
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    kinds: dict[str, set[str]] = {}
    for path in open_tensors(tmp_path / "optimizer", "optimizer"):
        _, name, kind = path.split("/")
        kinds.setdefault(name, set()).add(kind)
    matrices = {name for name, own in kinds.items() if own == {"momentum_buffer", "step", "master"}}
    assert any("q_proj" in name for name in matrices)
    rest = [own for name, own in kinds.items() if name not in matrices]
    assert all(own == {"exp_avg", "exp_avg_sq", "step", "master"} for own in rest)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, TP], ids=["dp2", "tp2"])
def test_two_ranks_resume_bit_exactly(two_ranks, make_rows, tmp_path, layout):
    rows = make_rows().get_dict()
    expected = two_ranks(save_after, rows, str(tmp_path), layout)[0]
    found = two_ranks(resume, rows, str(tmp_path), layout)[0]
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert Path(tmp_path / "optimizer").is_dir()
