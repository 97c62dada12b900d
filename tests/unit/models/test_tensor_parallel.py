"""A model that is split over ranks computes and learns the same as the whole model."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    HunYuanDenseV1Config,
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from lucidrl.errors import ConfigError
from lucidrl.models import attention
from lucidrl.models.attention import PaddedLayout
from lucidrl.models.head import LogitTransform, token_logprobs
from lucidrl.models.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from tests.tiers import slow_except

VOCABULARY = 51
"""Splits unevenly over two and four ranks."""
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 3,
    "eos_token_id": 1,
    "bos_token_id": None,
}
CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": partial(Qwen3Config, head_dim=8),
    "mistral": partial(MistralConfig, head_dim=8, sliding_window=5),
    "gemma": partial(GemmaConfig, head_dim=8),
    "gemma2": partial(Gemma2Config, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=1.5),
    "gemma3": partial(Gemma3TextConfig, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "phi": partial(PhiConfig, qk_layernorm=True),
    "phi3": Phi3Config,
    "hunyuan": partial(HunYuanDenseV1Config, head_dim=8),
}
TRANSFORM = LogitTransform(softcap=5.0, temperature=0.7)
HERE = "tests.unit.models.test_tensor_parallel"
FEED_FORWARD_PLAN = {
    "model.embed_tokens": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
MISSPELT_PLAN = {"model.layers.*.mlp.gate": "colwise"}
UNKNOWN_STYLE_PLAN = {"model.layers.*.mlp.gate_proj": "sideways"}
INCOMPLETE_PLAN = {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
NORM_PLAN = {"model.norm": "rowwise"}
EMPTY_PLAN: dict[str, str] = {}


def make_whole_plan(model: PreTrainedModel, sequence_parallel: bool) -> dict[str, ParallelStyle | str]:
    """A complete plan, also for sequence parallelism."""
    between = Shard(1) if sequence_parallel else Replicate()
    norms = {"model.layers.*.input_layernorm": SequenceParallel(use_local_output=True)} if sequence_parallel else {}
    return {
        **FEED_FORWARD_PLAN,
        **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=between),
        **norms,
    }


class Scorer(nn.Module):
    """The root that is sharded over data-parallel ranks: hidden states, and log-probabilities plus entropy."""

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.model, self.group = model, group

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        decoder = self.model.base_model
        hidden = decoder(input_ids=ids, position_ids=positions, use_cache=False, layout=PaddedLayout())
        hidden = hidden.last_hidden_state
        head: Any = self.model.get_output_embeddings()
        scored = token_logprobs(
            hidden[:, :-1].flatten(0, 1), head, ids[:, 1:].flatten(), TRANSFORM, with_entropy=True, group=self.group
        )
        assert scored.entropy is not None
        return hidden, torch.stack([scored.logprobs, scored.entropy], dim=-1).view(len(ids), -1, 2)


def make_model(name: str, tied: bool, **overrides: Any) -> PreTrainedModel:
    config = CONFIGS[name](**(TINY | {"tie_word_embeddings": tied} | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).double().eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases, and the weights of norms
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def make_ids() -> torch.Tensor:
    """Four rows with every token of the vocabulary, the pad token included."""
    return torch.randperm(VOCABULARY + 13, generator=torch.Generator().manual_seed(1)).remainder(VOCABULARY).view(4, 16)


def loss_of(scores: torch.Tensor) -> torch.Tensor:
    return (scores * torch.linspace(-1, 2, scores[0].numel(), dtype=scores.dtype).view_as(scores[0])).sum()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def wrapped(model: PreTrainedModel, mesh: DeviceMesh) -> Scorer:
    scorer = Scorer(model, mesh["tp"].get_group())
    for module in [*model.base_model.layers, scorer]:
        fully_shard(module, mesh=mesh["dp"]).set_gradient_divide_factor(1.0)
    return scorer


def differences(
    name: str,
    tied: bool,
    shape: tuple[int, int],
    sequence_parallel: bool,
    overrides: dict[str, Any],
    custom_plan: str | None = None,
) -> dict[str, float]:
    """Largest differences between this rank of a (dp, tp) mesh and one rank, by result."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    ids = make_ids()
    reference = Scorer(make_model(name, tied, **overrides))
    hidden, scores = reference(ids)
    loss_of(scores).backward()

    model = make_model(name, tied, **overrides)
    apply_tensor_parallel(model, mesh["tp"], sequence_parallel=sequence_parallel, custom_plan=custom_plan)
    scorer = wrapped(model, mesh)
    own = slice(mesh["dp"].get_local_rank(), None, shape[0])
    own_hidden, own_scores = scorer(ids[own])
    loss_of(own_scores).backward()

    found = {"hidden": (own_hidden, hidden[own]), "scores": (own_scores, scores[own])}
    expected = dict(reference.named_parameters())
    for key, parameter in scorer.named_parameters():
        assert parameter.grad.placements == parameter.placements
        found[key] = (parameter.grad, expected[key].grad)
    assert len(found) == len(expected) + 2
    return {key: float((whole(ours) - theirs.detach()).abs().max()) for key, (ours, theirs) in found.items()}


def assert_equal_to_one_rank(results: list[dict[str, float]], name: str) -> None:
    for by_name in results:
        wrong = {key: value for key, value in by_name.items() if value > tolerance(name, key)}
        assert not wrong


def tolerance(name: str, key: str) -> float:
    # Gemma adds up the gradients of its norms in float32 in every precision.
    return 1e-5 if name.startswith("gemma") and "norm" in key else 1e-9


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", slow_except(CONFIGS, "llama", "qwen3"))
def test_every_architecture_on_two_ranks_equals_one_rank(two_ranks, name, tied, sequence_parallel):
    assert_equal_to_one_rank(two_ranks(differences, name, tied, (1, 2), sequence_parallel, {}), name)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(
    ("name", "shape", "overrides"),
    [
        pytest.param("llama", (1, 4), {"num_key_value_heads": 4}, id="llama_tp4"),
        pytest.param("llama", (2, 2), {}, id="llama_dp2_tp2"),
        pytest.param("phi", (2, 2), {}, id="phi_dp2_tp2"),
        pytest.param("gemma3", (2, 2), {}, id="gemma3_dp2_tp2"),
    ],
)
def test_four_ranks_equal_one_rank(four_ranks, name, shape, overrides, sequence_parallel):
    results = four_ranks(differences, name, True, shape, sequence_parallel, overrides)
    assert_equal_to_one_rank(results, name)


@pytest.mark.parametrize(
    ("plan", "sequence_parallel"),
    [("FEED_FORWARD_PLAN", False), ("make_whole_plan", False), ("make_whole_plan", True)],
    ids=["feed_forward_only", "function", "function_sp"],
)
def test_a_custom_plan_equals_one_rank(two_ranks, plan, sequence_parallel):
    results = two_ranks(differences, "llama", True, (1, 2), sequence_parallel, {}, f"{HERE}.{plan}")
    assert_equal_to_one_rank(results, "llama")


def test_a_plan_that_leaves_attention_whole_takes_any_number_of_heads(two_ranks):
    odd = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
    results = two_ranks(differences, "llama", True, (1, 2), False, odd, f"{HERE}.FEED_FORWARD_PLAN")
    assert_equal_to_one_rank(results, "llama")


def after_three_steps(name: str, sequence_parallel: bool) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Largest differences of the weights from those of one rank, and the parameters that are not split."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = make_model(name, tied=True)
    apply_tensor_parallel(model, mesh["tp"], sequence_parallel=sequence_parallel)
    scorer, reference = wrapped(model, mesh), Scorer(make_model(name, tied=True))
    for trained in (scorer, reference):
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
        for _ in range(3):
            loss_of(trained(make_ids())[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(reference.named_parameters())
    far = {key: float((whole(ours) - expected[key]).abs().max()) for key, ours in scorer.named_parameters()}
    unsplit = {key: p.to_local().detach() for key, p in scorer.named_parameters() if "norm" in key or "dense.b" in key}
    return far, unsplit


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", ["qwen3", "phi"])
def test_parameters_that_are_not_split_stay_the_same_on_all_ranks(two_ranks, name, sequence_parallel):
    (far, first), (_, second) = two_ranks(after_three_steps, name, sequence_parallel)
    assert max(far.values()) < 1e-9
    assert first
    assert all(torch.equal(first[key], second[key]) for key in first)


def tied_and_split() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    found: list[Any] = []
    for tied in (True, False):
        model: Any = make_model("phi", tied)
        apply_tensor_parallel(model, mesh)
        found.append(model.lm_head.weight is model.model.embed_tokens.weight)
        found += [parameter.placements for parameter in model.lm_head.parameters()]
    return found


def test_tied_embeddings_stay_one_parameter_and_the_head_is_split_with_its_bias(two_ranks):
    split = (Shard(0),)
    assert two_ranks(tied_and_split) == [[True, split, split, False, split, split]] * 2


def collectives(name: str, sequence_parallel: bool) -> tuple[int, int]:
    """Number of collectives in the forward and the backward pass."""
    mesh = init_device_mesh("cpu", (2,))
    model = make_model(name, tied=True)
    apply_tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
    scorer = Scorer(model, mesh.get_group())
    with CommDebugMode() as forward:
        loss = loss_of(scorer(make_ids())[1])
    with CommDebugMode() as backward:
        loss.backward()
    return forward.get_total_counts(), backward.get_total_counts()


def test_a_block_exchanges_its_output_once_and_its_input_gradient_once(two_ranks):
    blocks, embedding, head = 4, 1, 1
    assert two_ranks(collectives, "llama", False)[0] == (embedding + blocks + head, blocks + head)


def test_sequence_parallelism_adds_one_gather_per_block_and_one_after_the_last_norm(two_ranks):
    blocks, embedding, head, last_norm = 4, 1, 1, 1
    forward = embedding + 2 * blocks + last_norm + head
    assert two_ranks(collectives, "llama", True)[0] == (forward, head + 2 * blocks + embedding)


def parts_on_the_meta_device() -> set[tuple[torch.device, bool]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["gemma3"](**TINY), attn_implementation=attention.NAME)
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,)), sequence_parallel=True)
    return {(parameter.device, isinstance(parameter, DTensor)) for parameter in model.parameters()}


def test_a_model_without_weights_can_be_split(two_ranks):
    assert two_ranks(parts_on_the_meta_device) == [{(torch.device("meta"), True)}] * 2


@pytest.mark.parametrize(
    ("size", "heads", "key"), [(2, (9, 3), "num_attention_heads=9"), (4, (12, 3), "num_key_value_heads=3")]
)
def test_a_size_that_splits_a_head_is_refused(size, heads, key):
    config = LlamaConfig(hidden_size=576, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    sentence = f"tensor_parallel_size={size} does not divide the model's {key}; choose a size that divides"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_tensor_parallel(model, size)


def refusal(config: PreTrainedConfig, options: dict[str, Any]) -> str:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    before = {name: type(parameter) for name, parameter in model.named_parameters()}
    try:
        apply_tensor_parallel(model, init_device_mesh("cpu", (2,)), **options)
    except ConfigError as error:
        assert {name: type(parameter) for name, parameter in model.named_parameters()} == before
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"custom_plan": "no_such_module.PLAN"}, "custom_parallel_plan='no_such_module.PLAN' cannot be imported"),
        ({"custom_plan": f"{HERE}.VOCABULARY"}, "is a int; set it to a mapping of module names to styles"),
        (
            {"custom_plan": f"{HERE}.MISSPELT_PLAN"},
            "names 'model.layers.*.mlp.gate', which matches no module of LlamaForCausalLM; "
            "write names such as 'model.layers.*.self_attn.q_proj'",
        ),
        (
            {"custom_plan": f"{HERE}.UNKNOWN_STYLE_PLAN"},
            "unknown style 'sideways' for model.layers.0.mlp.gate_proj (known: colwise, rowwise",
        ),
        (
            {"custom_plan": f"{HERE}.INCOMPLETE_PLAN"},
            "splits model.layers.0.mlp, but has no entry for model.layers.0.mlp.up_proj; set policy",
        ),
        ({"custom_plan": f"{HERE}.NORM_PLAN"}, "splits model.norm, a LlamaRMSNorm, but only nn.Linear can be split"),
        ({"custom_plan": f"{HERE}.EMPTY_PLAN"}, "splits no matrix of LlamaForCausalLM; set policy.dtensor_cfg.cust"),
        (
            {"custom_plan": f"{HERE}.FEED_FORWARD_PLAN", "sequence_parallel": True},
            "sequence_parallel=true: LlamaForCausalLM has model.layers.0.self_attn between its blocks",
        ),
    ],
)
def test_an_invalid_plan_is_refused_before_any_split(two_ranks, options, sentence):
    for found in two_ranks(refusal, LlamaConfig(**TINY), options):
        assert sentence in found


def test_an_architecture_without_a_plan_is_refused(two_ranks):
    found = two_ranks(refusal, GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=VOCABULARY), {})[0]
    assert found == (
        "GPT2LMHeadModel has no plan for tensor parallelism; "
        "set policy.dtensor_cfg.custom_parallel_plan to your own plan, or set tensor_parallel_size=1"
    )


def test_sequence_parallelism_without_a_last_norm_is_refused(two_ranks):
    found = two_ranks(refusal, OlmoConfig(**TINY), {"sequence_parallel": True})[0]
    assert found == (
        "sequence_parallel=true needs one final norm after the decoder layers, but OlmoForCausalLM has none; "
        "set sequence_parallel=false"
    )


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"num_key_value_heads": 1}, "tensor_parallel_size=2 does not divide the model's num_key_value_heads=1"),
        ({"intermediate_size": 49}, "tensor_parallel_size=2 does not divide the 49 features of model.layers.0.mlp."),
    ],
)
def test_a_model_that_does_not_split_evenly_is_refused(two_ranks, overrides, sentence):
    assert sentence in two_ranks(refusal, LlamaConfig(**(TINY | overrides)), {})[0]
