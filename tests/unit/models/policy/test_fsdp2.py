"""FSDP2 on two ranks: sharding, gathering, copies, generation. For training, see test_ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker, get_cpu_state_dict, unshard_fsdp2_model

PADDED = {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 1}
MLP_ONLY = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def make_worker(precision: str = "float64", **options: Any) -> DTensorPolicyWorker:
    config = PolicyConfig(precision=precision, **{**PADDED, **options})
    return DTensorPolicyWorker(config, embedded_tokenizer(), init_reference_model=False)


# Sharding


def units(cpu_offload: bool) -> dict[str, bool]:
    """Return the name of every FSDP module → whether it is offloaded to host memory."""
    model = make_worker(dtensor_cfg={"cpu_offload": cpu_offload}).model
    return {
        name: isinstance(group.offload_policy, CPUOffloadPolicy)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    }


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_layers_are_gathered_one_by_one_and_the_rest_with_the_root(two_ranks, cpu_offload):
    names = ["", *(f"model.model.layers.{number}" for number in range(4))]
    assert two_ranks(units, cpu_offload) == [dict.fromkeys(names, cpu_offload)] * 2


def matrices_split_by(plan: str | None) -> set[str]:
    worker = make_worker(dtensor_cfg={"tensor_parallel_size": 2, "custom_parallel_plan": plan})
    layer = worker.model.model.model.layers[0]
    # The others have FSDP's axis only.
    return {name.split(".")[1] for name, weight in layer.named_parameters() if len(weight.placements) == 2}


def test_a_custom_plan_splits_the_modules_it_names(two_ranks):
    mlp = {"gate_proj", "up_proj", "down_proj"}
    assert two_ranks(matrices_split_by, "tests.unit.models.policy.test_fsdp2.MLP_ONLY") == [mlp] * 2
    assert two_ranks(matrices_split_by, None) == [mlp | {"q_proj", "k_proj", "v_proj", "o_proj"}] * 2


def norm_of_repeated(times: int, rows: dict[str, Any]) -> float:
    worker = make_worker("bfloat16")
    own = BatchedDataDict(rows).slice(3 + worker.rank, 4 + worker.rank).repeat_interleave(times)
    return float(worker.train(own, NLLLoss())["grad_norm"])


@pytest.mark.slow
def test_half_precision_gradients_of_many_micro_batches_add_up_in_float32(two_ranks, make_rows):
    """A mean over the same row 32 times: small additions to a bfloat16 sum would be lost."""
    rows = make_rows().get_dict()
    for once, often in zip(*(two_ranks(norm_of_repeated, times, rows) for times in (1, 32)), strict=True):
        assert often == pytest.approx(once, rel=1e-6)


# Gathering


class Fragile(nn.Linear):
    """A layer that can be made to fail."""

    fails = False

    def forward(self, input):
        if self.fails:
            raise RuntimeError("this layer fails")
        return super().forward(input)


def sharded_model() -> tuple[nn.Sequential, torch.Tensor]:
    """Return a model whose first layer stays gathered after a forward pass, and an input."""
    torch.manual_seed(0)
    model = nn.Sequential(Fragile(4, 4), Fragile(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    fully_shard(model[1], mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model, torch.ones(2, 4)


def are_sharded(model: nn.Sequential) -> list[bool]:
    return [isinstance(layer.weight, DTensor) for layer in model]


def gather_and_leave(how: str) -> None:
    model, input = sharded_model()
    expected = model(input)
    assert are_sharded(model) == [False, True, True]
    try:
        with unshard_fsdp2_model(model):
            assert are_sharded(model) == [False] * 3
            torch.testing.assert_close(model[2](model[1](model[0](input))), expected)
            assert are_sharded(model) == [False] * 3  # after submodules were called, too
            if how == "by an exception":
                raise RuntimeError("outside of a layer")
            model[1].fails = how == "by an exception in a forward pass"
            model(input)
    except RuntimeError:
        assert how != "at the end"
    model[1].fails = False
    assert are_sharded(model) == [True] * 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    doubled = model(input)
    assert are_sharded(model) == [False, True, True]
    whole = {name: tensor.full_tensor() for name, tensor in sharded_model()[0].named_parameters()}
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    plain.load_state_dict({name: 2 * tensor for name, tensor in whole.items()})
    torch.testing.assert_close(doubled, plain(input))


@pytest.mark.parametrize("how", ["at the end", "by an exception", "by an exception in a forward pass"])
def test_a_gathered_model_is_resharded_after_every_exit(two_ranks, how):
    """Each module gathers and reshards as before, and uses changed weights."""
    two_ranks(gather_and_leave, how)


def copies_and_shards(pin_memory: bool) -> None:
    model, _ = sharded_model()
    whole = torch.arange(3.0)
    state = {**model.state_dict(), "plain": whole}
    copies = get_cpu_state_dict(iter(state.items()), pin_memory=pin_memory)
    expected = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
    assert copies.keys() == expected.keys()
    assert copies["0.weight"].shape == (2, 4)
    with torch.no_grad():
        for name, part in expected.items():
            assert type(copies[name]) is torch.Tensor
            assert torch.equal(copies[name], part)
            part.add_(1)
            assert torch.equal(copies[name] + 1, part)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_copies_of_shards_share_nothing_with_them(two_ranks, pin_memory):
    """Without a GPU, memory is not pinned."""
    two_ranks(copies_and_shards, pin_memory)


# Generation


def prompts() -> dict[str, Any]:
    texts = ["12+30=", "7+8=", "40+41="]
    ids = [render_prompt(embedded_tokenizer(), [{"role": "user", "content": text}]) for text in texts]
    width = max(map(len, ids))
    return {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        "input_lengths": torch.tensor([len(row) for row in ids]),
        "draw_keys": torch.arange(3) + 11,
    }


def generated(parallel: dict[str, Any], greedy: bool) -> dict[str, Any]:
    worker = make_worker(dtensor_cfg=parallel, generation={"max_new_tokens": 8, "temperature": 1.3})
    return worker.generate(BatchedDataDict(prompts()), greedy).get_dict()


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "context_parallel_size"])
def test_ranks_with_the_same_rows_generate_like_one_rank(two_ranks, axis, greedy):
    alone = generated({}, greedy)
    for result in two_ranks(generated, {axis: 2}, greedy):
        for name in ("output_ids", "generation_lengths", "unpadded_sequence_lengths"):
            assert torch.equal(result[name], alone[name])
        torch.testing.assert_close(result["logprobs"], alone["logprobs"], rtol=0, atol=1e-6)


def generate_with_sequence_parallel() -> str:
    with pytest.raises(ConfigError) as raised:
        generated({"tensor_parallel_size": 2, "sequence_parallel": True}, True)
    return str(raised.value)


def test_generation_with_sequence_parallel_is_refused(two_ranks):
    sentence = (
        "policy.dtensor_cfg.sequence_parallel=true splits the tokens of a row over ranks, but generation adds one "
        "token at a time; set it to false, or set policy.generation.placement=separate"
    )
    assert two_ranks(generate_with_sequence_parallel) == [sentence] * 2
