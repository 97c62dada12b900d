"""Tensor parallelism: the matrices of a Hugging Face model are split over ranks, its code runs unchanged.

Parameters become DTensors, activations are plain local tensors wherever the model's code touches them. Embedding and
head are split by vocabulary. What no plan names, such as the norms between blocks, stays whole on every rank: all ranks
compute the same hidden states and, because every block's input gradient is summed over the ranks, the same gradients,
so these parameters stay equal without any exchange of their own.

With sequence parallelism the activations between blocks are split along time as well. Then the norms see different
tokens on every rank; their parameters are replicated DTensors, and their gradients are sums over the ranks.
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
"""The layout of hidden states [B, T, D] that are split along time."""

STYLES: dict[str, Callable[[Placement], ParallelStyle]] = {
    "colwise": lambda between: ColwiseParallel(),
    "rowwise": lambda between: RowwiseParallel(output_layouts=between),
    "colwise_gather_output": lambda between: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda between: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
    # A norm over each head's features, on a rank's own heads. To such a norm, heads and times are the same: any dim
    # but the last may be called the split one, wherever the model puts its heads.
    "replicated_with_grad_allreduce": lambda between: SequenceParallel(use_local_output=True),
}
"""The words of transformers' plans, given the layout of the hidden states between blocks."""

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
"""What transformers' plans leave out, by model type."""


def apply_tensor_parallel(
    model: PreTrainedModel, tp_mesh: DeviceMesh, *, sequence_parallel: bool = False, custom_plan: str | None = None
) -> None:
    """Turn a causal language model, in place, into this rank's part of its tensor-parallel form.

    Its parameters are the same on all ranks, or all on the meta device: no weight is sent. The decoder then takes and
    gives whole tensors: the same tokens in, the same hidden states out on every rank. The head is only split: its
    `forward` is not to be called, `token_logprobs` and `gathered_logits` read its parameters.

    Args:
        tp_mesh: of one axis.
        sequence_parallel: split activations between blocks along time; T must be a multiple of the mesh's size.
        custom_plan: import path of a plan, instead of the model's own: a mapping of module names, `*` for any one part
            of a name, to a `ParallelStyle` or one of the words in `STYLES`; or a function of (model, sequence_parallel)
            that returns one. What it says of embedding and head is passed over: these are always split by vocabulary.
            With `sequence_parallel`, norms that it does not name are seen to.
    """
    styles = check_tensor_parallel(model, tp_mesh.size(), sequence_parallel=sequence_parallel, custom_plan=custom_plan)
    _split_by_vocabulary(model, tp_mesh, _between(sequence_parallel))
    for name, style in styles:
        parallelize_module(model.get_submodule(name), tp_mesh, style, src_data_rank=None)


def check_tensor_parallel(
    model: PreTrainedModel, size: int, *, sequence_parallel: bool = False, custom_plan: str | None = None
) -> list[tuple[str, ParallelStyle]]:
    """How `apply_tensor_parallel` would split the modules of a model over so many ranks; changes nothing.

    Raises:
        ConfigError: if it cannot be split, naming what is in the way.
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
    """How activations lie over the ranks between blocks."""
    return TIME if sequence_parallel else Replicate()


def _check_heads(config: Any, size: int) -> None:
    """Refuse a size that would cut through a head."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    for key, count in (("num_attention_heads", heads), ("num_key_value_heads", key_value_heads)):
        if count % size:
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide the model's {key}={count}; "
                "choose a size that divides both its attention heads and its key-value heads"
            )


class _BlockInput(ParallelStyle):
    """Make the hidden states that enter a block one replicated DTensor, gathered along time if need be.

    All projections of the block read it, so that their gradients are summed over the ranks once for the block.
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
    """Embedding and head. Tied ones go on sharing their parameter."""
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
    """Ranks with parts of different length would wait for each other forever."""
    length = args[0].shape[1]
    assert length % size == 0, f"rows of {length} tokens do not split over {size} ranks"


def _plan(model: PreTrainedModel, sequence_parallel: bool, custom_plan: str | None) -> Mapping[str, Any]:
    """Patterns of module names, as seen from `model`, with a style or the word for one."""
    if custom_plan is not None:
        plan = import_object(custom_plan, CUSTOM_PLAN_KEY)
        if callable(plan):
            try:
                plan = plan(model, sequence_parallel)
            except Exception as error:  # a user's function may raise anything
                raise ConfigError(
                    f"{CUSTOM_PLAN_KEY}={custom_plan!r} raised {type(error).__name__}: {error}; "
                    "a function is called with the model and whether it is sequence parallel, and returns the plan"
                ) from error
        if not isinstance(plan, Mapping):
            raise ConfigError(
                f"{CUSTOM_PLAN_KEY}={custom_plan!r} gives a {type(plan).__name__}; "
                "it must be a mapping of module names to styles, or a function that returns one"
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
    """The style of each module that the plan names.

    Args:
        is_custom: refuse patterns that match nothing. An architecture's own plan has some, for parts that not all of
            its models have.
    """
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
                logger.info("the tensor-parallel plan for %s is passed over: it is split by vocabulary", name)
            else:
                styles[name] = _style(name, style, between)
    return styles


def _style(name: str, style: Any, between: Placement) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style in STYLES:
        return STYLES[style](between)
    raise _unusable(
        f"the tensor-parallel plan wants {style!r} for {name}; known are a ParallelStyle and {', '.join(STYLES)}"
    )


def _example_name(model: PreTrainedModel) -> str:
    """The pattern of some linear layer in the decoder."""
    names = (name for name, module in model.base_model.named_modules() if isinstance(module, nn.Linear))
    return f"{model.base_model_prefix}.{re.sub(r'[.][0-9]+[.]', '.*.', next(names, 'layers.0.mlp'))}"


def _blocks(model: PreTrainedModel, styles: Mapping[str, ParallelStyle], size: int) -> list[str]:
    """The modules that hold the split matrices, such as attention and feed-forward of every layer."""
    split = _split_matrices(styles)
    if not split:
        raise _unusable(f"the tensor-parallel plan splits no matrix of {type(model).__name__}")
    for name in split:
        _check_split(name, model.get_submodule(name), styles[name], size)
    blocks = list(dict.fromkeys(map(_parent, split)))
    for block in blocks:
        # What has no style would see a part of the features or heads, and nobody would add up its gradient.
        for name in _with_parameters(model, block):
            if name not in styles:
                raise _unusable(f"the tensor-parallel plan splits {block}, but says nothing of {name}")
    return blocks


def _unusable(problem: str) -> ConfigError:
    return ConfigError(f"{problem}; name a plan of yours as {CUSTOM_PLAN_KEY}, or set tensor_parallel_size=1")


def _split_matrices(styles: Mapping[str, ParallelStyle]) -> list[str]:
    return [name for name, style in styles.items() if isinstance(style, ColwiseParallel | RowwiseParallel)]


def _parent(name: str) -> str:
    """The name of the module that a module is part of."""
    return name.rpartition(".")[0]


def _check_split(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    if not isinstance(module, nn.Linear):
        raise ConfigError(
            f"the tensor-parallel plan splits {name}, a {type(module).__name__}; only nn.Linear can be split, "
            "give it another style"
        )
    # A rank's local activations must tell how large those of the others are.
    features = module.out_features if isinstance(style, ColwiseParallel) else module.in_features
    if features % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the {features} features of {name}; choose a size that does"
        )


def _norm_styles(
    model: PreTrainedModel, styles: Mapping[str, ParallelStyle], blocks: list[str]
) -> list[tuple[str, ParallelStyle]]:
    """For sequence parallelism: norms between the blocks work on a part of the times, the last one gathers them."""
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
                f"sequence_parallel=true: {type(model).__name__} has {name} between its blocks, which is not known to "
                "treat every token alone; set sequence_parallel=false"
            )
    if len(outer) != 1:
        raise ConfigError(
            f"sequence_parallel=true: {type(model).__name__} has {outer or 'nothing'} around its layers, not one norm "
            "behind them; set sequence_parallel=false"
        )
    norms = [(name, SequenceParallel(use_local_output=True)) for name in [*inner, *outer] if name not in styles]
    return [*norms, (outer[0], PrepareModuleOutput(output_layouts=TIME, desired_output_layouts=Replicate()))]


def _with_parameters(model: nn.Module, parent: str) -> list[str]:
    """The names of a module's own parameters, and of its children that have some."""
    module = model.get_submodule(parent)
    children = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    return [f"{parent}.{name}" for name in (*dict(module.named_parameters(recurse=False)), *children)]
