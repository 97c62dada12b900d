"""Joining the other ranks, from what whoever started them left in the environment: a worker group or torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lucidrl.errors import ConfigError


@dataclass(frozen=True)
class RankInfo:
    """The place of this process among the ranks."""

    rank: int = 0
    local_rank: int = 0
    """Its number on this machine, and that of its GPU."""
    world_size: int = 1
    own_group: ReferenceType[ProcessGroup] | None = field(default=None, compare=False, repr=False)
    """The default process group, if it was made for this place; somebody else's is not to be ended here. Weak, because
    a group that outlives its end takes its threads down with the interpreter, and now and then aborts there."""


def init_process_group_from_environment(timeout_s: float) -> RankInfo:
    """Join torch's default process group: gloo for CPU tensors and, where there are GPUs, nccl for theirs.

    Without RANK in the environment this process is the only rank, and no group is made. A default group that exists
    already is left as it is, and so is the current GPU of whoever made it.

    Args:
        timeout_s: deadline of the joining and of every collective after it.

    Raises:
        ConfigError: if the environment is incomplete, or there are more ranks on this machine than GPUs.
    """
    if dist.is_initialized():
        return RankInfo(dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0")), dist.get_world_size())
    if "RANK" not in os.environ:
        return RankInfo()
    info = _info_from_environment()
    if torch.cuda.is_available():
        if info.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {info.local_rank} has no GPU: this machine has {torch.cuda.device_count()}, and every "
                "rank needs its own; start fewer ranks here, or hide the GPUs with CUDA_VISIBLE_DEVICES= to use CPUs"
            )
        torch.cuda.set_device(info.local_rank)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    assert dist.group.WORLD is not None
    return replace(info, own_group=ref(dist.group.WORLD))


def leave_process_group(info: RankInfo) -> None:
    """End the default process group, if it was made by the call that gave `info`; may be called twice."""
    if info.own_group is not None and dist.is_initialized() and dist.group.WORLD is info.own_group():
        dist.destroy_process_group()


def check_exchanges_cpu_tensors(why: str) -> None:
    """Refuse a default group that exchanges tensors of GPUs only, as one that a user made may be.

    Args:
        why: the setting for which CPU tensors are exchanged, at the beginning of the sentence.
    """
    backend = dist.get_backend_config()
    if "cpu:" not in backend:
        raise ConfigError(
            f"{why} exchanges tensors in host memory, but the process group that exists already has {backend} only; "
            "make it with the backend cpu:gloo,cuda:nccl, or leave it to the worker"
        )


def _info_from_environment() -> RankInfo:
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise ConfigError(
            f"RANK={os.environ['RANK']} is set, but {' and '.join(missing)} not; a rank needs all of "
            f"{', '.join(needed)}: start it with torchrun, or unset RANK to run alone"
        )
    rank, local_rank, world_size = (int(os.environ[name]) for name in needed[:3])
    return RankInfo(rank, local_rank, world_size)
