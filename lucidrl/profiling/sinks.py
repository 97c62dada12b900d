"""Shows blocks of code to whoever records this process: torch's profiler, or Nsight Systems."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from lucidrl.profiling.settings import NSYS_SESSION

NOT_RECORDED: AbstractContextManager[None] = nullcontext()
"""What a block is in when nobody looks; one object for all."""

# What `torch.profiler.record_function` comes to, without its way through the dispatcher: a third of its time.
_enter: Any = torch._C._autograd._record_function_with_args_enter
_exit: Any = torch._C._autograd._record_function_with_args_exit


def is_under_nsys() -> bool:
    """Whether Nsight Systems runs this process, and can see a GPU in it."""
    return NSYS_SESSION in os.environ and torch.cuda.is_available()


_emits_nvtx = is_under_nsys()


def recorded(name: str) -> AbstractContextManager[None]:
    """A block under this name in the trace that is being recorded; `NOT_RECORDED` if there is none."""
    # The flag is that of the process: a profiler of all threads does not show in the state of any.
    if torch_profiler._is_profiler_enabled or _emits_nvtx:
        return _RecordedBlock(name)
    return NOT_RECORDED


class _RecordedBlock:
    """A class, because a generator context manager costs more than what it does here."""

    __slots__ = ("_handle", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _emits_nvtx:
            torch.cuda.nvtx.range_push(self._name)
        self._handle = _enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _exit(self._handle)
        if _emits_nvtx:
            torch.cuda.nvtx.range_pop()
