"""The reference policy: the weights a run started from, exchanged with the current ones while they are asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lucidrl.distributed.batching import round_up
from lucidrl.errors import ConfigError

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""
_BUFFER_ELEMENTS = 1 << 22
_COPIES_A_PIECE = 3


class ReferencePolicy:
    """Holds a copy of a model's weights, in pinned memory where the model is on an accelerator.

    The two are exchanged piece by piece through one small buffer: no second copy of the model is ever made. All copies
    there and back are one list, and how many are done is counted after each. A copy can be made again as long as the
    next has not begun, so that an exchange that was interrupted, wherever that was, can always go on.

    Args:
        weights: the memory that the model computes with; it stays the same memory.
    """

    def __init__(self, weights: Sequence[torch.Tensor]):
        kept = [_host_copy(tensor) for tensor in weights]
        buffers: dict[torch.dtype, torch.Tensor] = {}
        for tensor in kept:
            size = min(tensor.numel(), _BUFFER_ELEMENTS)
            known = buffers.get(tensor.dtype)
            if known is None or known.numel() < size:
                buffers[tensor.dtype] = torch.empty(size, dtype=tensor.dtype, pin_memory=tensor.is_pinned())
        pieces = [
            _exchange(ours, theirs, buffers[theirs.dtype][: theirs.numel()])
            for whole, copy in zip(weights, kept, strict=True)
            for ours, theirs in zip(_pieces(whole), _pieces(copy), strict=True)
        ]
        self._num_copies_in = _COPIES_A_PIECE * len(pieces)
        self._copies = [copy for piece in (*pieces, *reversed(pieces)) for copy in piece]
        self._num_done = 0

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the reference weights; afterwards, also on an exception, its own again.

        Inside another one nothing changes.
        """
        if self._num_done == self._num_copies_in:
            yield
            return
        self._restore()  # what an error in an earlier restoring left undone
        try:
            try:
                self._copy_until(self._num_copies_in)
                yield
            finally:
                self._restore()
        finally:
            self._restore()  # does nothing, unless an interruption came before the other one could begin

    def _restore(self) -> None:
        """Give the model its own weights, however far the exchange has come; interruptions come after that."""
        try:
            if self._num_done < self._num_copies_in:
                self._copy_until(round_up(self._num_done, _COPIES_A_PIECE))
                # Pieces go back in reverse order. Those that never came need not go.
                self._num_done = len(self._copies) - self._num_done
            self._copy_until(len(self._copies))
            self._num_done = 0
        except KeyboardInterrupt:
            self._restore()
            raise

    @torch.no_grad()
    def _copy_until(self, num_copies: int) -> None:
        while self._num_done < num_copies:
            target, source = self._copies[self._num_done]
            target.copy_(source)
            self._num_done += 1


def required(reference: ReferencePolicy | None) -> ReferencePolicy:
    """The reference policy of a policy that has to have one."""
    if reference is None:
        raise ConfigError("this policy was made with init_reference_model=False; it has no reference policy to use")
    return reference


def _exchange(ours: torch.Tensor, theirs: torch.Tensor, buffer: torch.Tensor) -> list[Copy]:
    """The copies that exchange two tensors."""
    return [(buffer, ours), (ours, theirs), (theirs, buffer)]


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.view(-1).split(_BUFFER_ELEMENTS)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
