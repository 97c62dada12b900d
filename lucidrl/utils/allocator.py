"""Settings of the C library's memory allocator."""

from __future__ import annotations

import ctypes
import sys

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's `mallopt`
_KEPT_BYTES = 1 << 30
_LARGEST_BYTES = 32 << 20  # glibc takes no more


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors of up to 32 MiB for the next ones, until it ends.

    Without this, glibc returns freed memory to the operating system at once, and the kernel has to clear the memory of
    each new tensor, which takes a fifth of the time of a decoding step. With it, the resident memory of the process
    stays near its peak. Does nothing with GPUs, or without glibc.
    """
    if not sys.platform.startswith("linux") or torch.cuda.is_available():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
