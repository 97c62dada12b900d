"""Tensor parallelism: ranks split the matrices of a Hugging Face model; the code of the model runs unchanged.

Parameters become DTensors; activations are plain local tensors. A block is a module with split matrices, such as
attention or feed-forward. Embedding and head are split by vocabulary. Modules without an entry in the plan, such as the
norms between blocks, are replicated. All ranks compute the same hidden states there, and the same gradients, because
the input gradient of every block is summed over ranks.

With sequence parallelism the activations between blocks are also split along time. Each rank then applies the norms to
different tokens, so the norms' parameters are replicated DTensors whose gradients are summed over ranks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from lucidrl.errors import ConfigError
from lucidrl.utils.imports import import_object

logger = logging.getLogger(__name__)

CUSTOM_PLAN_KEY = "policy.dtensor_cfg.custom_parallel_plan"
TIME = Shard(1)
"""Placement of hidden states [B, T, D] that are split along time."""

STYLES: dict[str, Callable[[Placement], ParallelStyle]] = {
    "colwise": lambda between: ColwiseParallel(),
    "rowwise": lambda between: RowwiseParallel(output_layouts=between),
    "colwise_gather_output": lambda between: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda between: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
    # A norm over the features of each head, applied to this rank's heads. It treats all dims but the last alike, so
    # SequenceParallel's split dim need not be the dim of the heads.
    "replicated_with_grad_allreduce": lambda between: SequenceParallel(use_local_output=True),
}
"""Style names in transformers' plans → function that returns the style, given the placement between blocks."""

OWN_PLANS: dict[str, Mapping[str, str]] = {
    "hunyuan_v1_dense": {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        **{f"layers.*.self_attn.{name}_layernorm": "replicated_with_grad_allreduce" for name in ("query", "key")},
        "layers.*.self_attn.o_proj": "rowwise",
        **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        "layers.*.mlp.down_proj": "rowwise",
    },
    "phi": {f"layers.*.self_attn.{name}_layernorm": "replicated_with_grad_allreduce" for name in "qk"},
}
"""Entries that transformers' plans lack, by model type."""


def apply_tensor_parallel(
    model: PreTrainedModel, tp_mesh: DeviceMesh, *, sequence_parallel: bool = False, custom_plan: str | None = None
) -> None:
    """Replace the parameters of a causal language model by this rank's shards.

    No weights are sent: all ranks must have the same parameters, or all have parameters on the meta device. Decoder
    inputs and outputs are whole tensors, equal on all ranks. Do not call the head's `forward`; use `token_logprobs` and
    `gathered_logits`, which read the head's parameters.

    Args:
        tp_mesh: a mesh with one axis.
        sequence_parallel: split activations between blocks along time; T must be a multiple of the mesh's size.
        custom_plan: import path of a plan to use instead of the model's plan. A plan maps module names, with `*` for
            any one component, to a `ParallelStyle` or a key of `STYLES`. The path may also name a function of (model,
            sequence_parallel) that returns a plan. Entries for embedding and head are ignored. With
            `sequence_parallel`, norms without an entry get a default style.
    """
    styles = check_tensor_parallel(model, tp_mesh.size(), sequence_parallel=sequence_parallel, custom_plan=custom_plan)
    _split_by_vocabulary(model, tp_mesh, _between(sequence_parallel))
    for name, style in styles:
        parallelize_module(model.get_submodule(name), tp_mesh, style, src_data_rank=None)


def check_tensor_parallel(
    model: PreTrainedModel, size: int, *, sequence_parallel: bool = False, custom_plan: str | None = None
) -> list[tuple[str, ParallelStyle]]:
    """Return the styles that `apply_tensor_parallel` would use on `size` ranks, without changing the model.

    Raises:
        ConfigError: the model cannot be split; the message names the reason.
    """
    between = _between(sequence_parallel)
    plan = _plan(model, sequence_parallel, custom_plan)
    styles = _planned_styles(model, plan, between, is_custom=custom_plan is not None)
    if any("Attention" in type(model.get_submodule(_parent(name))).__name__ for name in _split_matrices(styles)):
        _check_heads(model.config, size)
    blocks = _blocks(model, styles, size)
    around = _norm_styles(model, styles, blocks) if sequence_parallel else []
    entrances = [(block, _BlockInput(between)) for block in blocks if block not in styles]
    return [*styles.items(), *around, *entrances]


def _between(sequence_parallel: bool) -> Placement:
    """Return the placement of activations between blocks."""
    return TIME if sequence_parallel else Replicate()


def _check_heads(config: Any, size: int) -> None:
    """Refuse a size that would split an attention head."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    for key, count in (("num_attention_heads", heads), ("num_key_value_heads", key_value_heads)):
        if count % size:
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide the model's {key}={count}; "
                "choose a size that divides num_attention_heads and num_key_value_heads"
            )


class _BlockInput(ParallelStyle):
    """Turns the input of a block into one replicated DTensor, gathered along the sequence dim if it is sharded there.

    All projections of the block read this DTensor, so its gradient is summed over ranks once per block.
    """

    def __init__(self, layout: Placement):
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._prepare, device_mesh), with_kwargs=True)
        return module

    def _prepare(self, mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._gathered(args[0], mesh), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._gathered(kwargs["hidden_states"], mesh)}

    def _gathered(self, hidden: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [self.layout], run_check=False)
        return hidden.redistribute(placements=[Replicate()])


def _split_by_vocabulary(model: PreTrainedModel, mesh: DeviceMesh, between: Placement) -> None:
    """Split embedding and head by vocabulary; a tied head stays tied."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    if between == TIME:
        embedding.register_forward_pre_hook(partial(_check_length, mesh.size()))
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    parallelize_module(embedding, mesh, style, src_data_rank=None)
    for name, parameter in list(head.named_parameters()):
        split = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        head.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    if is_tied:
        head.weight = embedding.weight


def _check_length(size: int, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """Check that rows split evenly; ranks with different lengths would wait for each other forever."""
    length = args[0].shape[1]
    assert length % size == 0, f"rows of {length} tokens do not split over {size} ranks"


def _plan(model: PreTrainedModel, sequence_parallel: bool, custom_plan: str | None) -> Mapping[str, Any]:
    """Return the plan: patterns of module names in `model` → a `ParallelStyle` or a key of `STYLES`."""
    if custom_plan is not None:
        plan = import_object(custom_plan, CUSTOM_PLAN_KEY)
        if callable(plan):
            try:
                plan = plan(model, sequence_parallel)
            except Exception as error:  # a user's function may raise anything
                raise ConfigError(
                    f"{CUSTOM_PLAN_KEY}={custom_plan!r} raised {type(error).__name__}: {error}; "
                    "the function gets (model, sequence_parallel) and returns the plan"
                ) from error
        if not isinstance(plan, Mapping):
            raise ConfigError(
                f"{CUSTOM_PLAN_KEY}={custom_plan!r} is a {type(plan).__name__}; "
                "set it to a mapping of module names to styles, or to a function that returns such a mapping"
            )
        return plan
    config = model.config
    decoder_plan = {**(config.base_model_tp_plan or {}), **OWN_PLANS.get(config.model_type, {})}
    if not decoder_plan:
        raise _unusable(f"{type(model).__name__} has no plan for tensor parallelism")
    return {f"{model.base_model_prefix}.{pattern}": style for pattern, style in decoder_plan.items()}


def _planned_styles(
    model: PreTrainedModel, plan: Mapping[str, Any], between: Placement, *, is_custom: bool
) -> dict[str, ParallelStyle]:
    """Return the style of each module in the plan. Patterns that match no module are an error in a custom plan only."""
    styles: dict[str, ParallelStyle] = {}
    by_vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matches = [(name, module) for name, module in model.named_modules() if expression.fullmatch(name)]
        if is_custom and not matches:
            raise ConfigError(
                f"{CUSTOM_PLAN_KEY} names {pattern!r}, which matches no module of {type(model).__name__}; "
                f"write names such as {_example_name(model)!r}"
            )
        for name, module in matches:
            if module in by_vocabulary:
                logger.info(
                    "ignoring the entry of the tensor-parallel plan for %s: it is always split by vocabulary", name
                )
            else:
                styles[name] = _style(name, style, between)
    return styles


def _style(name: str, style: Any, between: Placement) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style in STYLES:
        return STYLES[style](between)
    raise _unusable(
        f"the tensor-parallel plan has the unknown style {style!r} for {name} (known: {', '.join(STYLES)}, or a "
        "ParallelStyle)"
    )


def _example_name(model: PreTrainedModel) -> str:
    """Return the name pattern of a linear layer in the decoder."""
    names = (name for name, module in model.base_model.named_modules() if isinstance(module, nn.Linear))
    return f"{model.base_model_prefix}.{re.sub(r'[.][0-9]+[.]', '.*.', next(names, 'layers.0.mlp'))}"


def _blocks(model: PreTrainedModel, styles: Mapping[str, ParallelStyle], size: int) -> list[str]:
    """Return the names of the modules with split matrices, such as attention and feed-forward of every layer."""
    split = _split_matrices(styles)
    if not split:
        raise _unusable(f"the tensor-parallel plan splits no matrix of {type(model).__name__}")
    for name in split:
        _check_split(name, model.get_submodule(name), styles[name], size)
    blocks = list(dict.fromkeys(map(_parent, split)))
    for block in blocks:
        # A module without a style would get a shard of the features or heads, and its gradient would be incomplete.
        for name in _with_parameters(model, block):
            if name not in styles:
                raise _unusable(f"the tensor-parallel plan splits {block}, but has no entry for {name}")
    return blocks


def _unusable(problem: str) -> ConfigError:
    return ConfigError(f"{problem}; set {CUSTOM_PLAN_KEY} to your own plan, or set tensor_parallel_size=1")


def _split_matrices(styles: Mapping[str, ParallelStyle]) -> list[str]:
    return [name for name, style in styles.items() if isinstance(style, ColwiseParallel | RowwiseParallel)]


def _parent(name: str) -> str:
    """Return the name of the parent module."""
    return name.rpartition(".")[0]


def _check_split(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    if not isinstance(module, nn.Linear):
        raise ConfigError(
            f"the tensor-parallel plan splits {name}, a {type(module).__name__}, but only nn.Linear can be split; "
            "use another style for this module"
        )
    # DTensor infers the full shape of activations from the local shape.
    features = module.out_features if isinstance(style, ColwiseParallel) else module.in_features
    if features % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the {features} features of {name}; choose a size that does"
        )


def _norm_styles(
    model: PreTrainedModel, styles: Mapping[str, ParallelStyle], blocks: list[str]
) -> list[tuple[str, ParallelStyle]]:
    """Return the styles of norms for sequence parallelism.

    Norms between blocks process this rank's positions; the output of the last norm is gathered along time.
    """
    modules = dict(model.named_modules())
    layers = dict.fromkeys(map(_parent, blocks))
    stack = _parent(next(iter(layers)))
    decoder = _parent(stack)
    inner = [name for layer in layers for name in _with_parameters(model, layer) if name not in blocks]
    known = (modules[stack], model.get_input_embeddings())
    outer = [name for name in _with_parameters(model, decoder) if modules.get(name) not in known]
    for name in [*inner, *outer]:
        if name not in styles and "Norm" not in type(modules.get(name)).__name__:
            raise ConfigError(
                f"sequence_parallel=true: {type(model).__name__} has {name} between its blocks, which may mix tokens; "
                "set sequence_parallel=false"
            )
    if len(outer) != 1:
        raise ConfigError(
            f"sequence_parallel=true needs one final norm after the decoder layers, but {type(model).__name__} has "
            f"{outer or 'none'}; set sequence_parallel=false"
        )
    norms = [(name, SequenceParallel(use_local_output=True)) for name in [*inner, *outer] if name not in styles]
    return [*norms, (outer[0], PrepareModuleOutput(output_layouts=TIME, desired_output_layouts=Replicate()))]


def _with_parameters(model: nn.Module, parent: str) -> list[str]:
    """Return the names of a module's direct parameters and of its child modules with parameters."""
    module = model.get_submodule(parent)
    children = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    return [f"{parent}.{name}" for name in (*dict(module.named_parameters(recurse=False)), *children)]
