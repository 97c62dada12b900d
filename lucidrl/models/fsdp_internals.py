"""All uses of private names of torch's FSDP and DTensor; check them with each new release of torch.

Each function says what the public interface lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback, _reshard, _unshard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lucidrl.profiling.spans import span
from lucidrl.profiling.worker_times import COMMUNICATION


def part_of_whole(parameter: DTensor) -> tuple[slice, ...]:
    """Return the slice of the full tensor that this rank holds; DTensor has no public method that returns it."""
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


# FSDP2


@contextmanager
def kept_after_forward(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Context manager: inside it, forward passes keep parameters gathered.

    The public `set_reshard_after_forward` does not return the previous setting, so it could not be restored.
    """
    groups = [group for module in modules for group in _groups(module)]
    settings = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, setting in zip(groups, settings, strict=True):
            group.post_forward_mesh_info = setting


def time_collectives(modules: Sequence[FSDPModule]) -> None:
    """Put spans around the collectives of these modules; their results do not change.

    The public setters take subclasses of FSDP's own collectives, which have no public names.
    """
    for module in modules:
        module.set_custom_all_gather(_TimedAllGather())
        module.set_custom_reduce_scatter(_TimedReduceScatter())


class _TimedAllGather(DefaultAllGather):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with span(COMMUNICATION):
            return super().__call__(*args, **kwargs)


class _TimedReduceScatter(DefaultReduceScatter):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with span(COMMUNICATION):
            return super().__call__(*args, **kwargs)


def reset_roots(modules: Sequence[FSDPModule]) -> None:
    """Free the parameters that a failed forward pass left gathered.

    The public `reset_iter_state` works on root modules only, and no public method tells which modules are roots.
    """
    for module in modules:
        if module._get_fsdp_state()._is_root:
            module.reset_iter_state()


def drop_waiting_gradients(modules: Sequence[FSDPModule]) -> None:
    """Drop accumulated gradients of gathered weights; `optimizer.zero_grad` does not reach them."""
    for module in modules:
        for group in _groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                parameter._unsharded_param.grad = None


def _groups(module: FSDPModule) -> list[Any]:
    return module._get_fsdp_state()._fsdp_param_groups


# FSDP1


def flat_parameter(module: FullyShardedDataParallel) -> nn.Parameter | None:
    """Return the module's flat parameter on this rank, if any; `parameters()` does not name the owning module."""
    return module._handle.flat_param if module._handle is not None else None


def tensors_in(flat: Any) -> list[tuple[nn.Module, str, torch.Size]]:
    """Return owner, name and shape of each tensor in a flat parameter, in memory order; tied tensors are listed once.

    No public method returns the contents of a flat parameter.
    """
    infos = zip(flat._param_infos, flat._shapes, strict=True)
    return [(info.module, info.param_name, shape) for info, shape in infos]


@contextmanager
def gathered_unit(module: FullyShardedDataParallel) -> Iterator[None]:
    """Context manager: inside it, an FSDP unit has its full weights in compute precision, and calls of the unit bypass
    FSDP, which would free the weights after the call.

    The public `summon_full_params` gathers float32 weights even if the model computes in half precision.
    """
    handle, stream = module._handle, module._device_handle.current_stream()
    assert handle is not None, "a unit has weights"
    _unshard(module, handle, stream, stream)
    module.forward = module.module.__call__  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        _reshard(module, handle, True)


def end_failed_pass(root: FullyShardedDataParallel, parameters: Iterable[Any]) -> None:
    """Let FSDP clean up after a failed forward or backward pass, even if only some gradients were computed.

    FSDP1 has no public method for this; it cleans up only at the end of a complete backward pass.
    """
    for parameter in parameters:
        parameter._post_backward_called = False  # the parameter has no usable gradient
    _post_backward_final_callback(root, root)
