"""Log-probabilities of rows, under the current weights or those of the reference policy.

The reference policy is the weights that a run started from, exchanged with the current ones while they are scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.batching import round_up
from lucidrl.errors import ConfigError
from lucidrl.models.policy.interfaces import LogprobOutputSpec
from lucidrl.models.policy.offload import Offload
from lucidrl.models.policy.row_plans import RowPlans
from lucidrl.models.policy.sharding import Sharding
from lucidrl.profiling.spans import span

_BUFFER_ELEMENTS = 1 << 22
_COPIES_PER_PIECE = 3


class Scorer:
    """Scores this rank's rows, micro-batch by micro-batch, in step with the other ranks.

    Args:
        offload: knows whether the weights are where they can be used.
        has_reference: keep the current weights as the reference policy.
    """

    def __init__(self, sharding: Sharding, row_plans: RowPlans, offload: Offload, *, has_reference: bool):
        self._sharding, self._row_plans, self._offload = sharding, row_plans, offload
        self._reference = ReferencePolicy(sharding.local_weights()) if has_reference else None

    @torch.no_grad()
    def logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, of_reference: bool = False
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """See `PolicyWorker.get_logprobs`; the results are on the CPU, in the order of the rows."""
        with self.reference_swapped_in() if of_reference else nullcontext(), span("logprobs"):
            self._offload.check_weights("get_logprobs")
            plan, order = self._row_plans.for_scoring(data, micro_batch_size)
            device = self._sharding.mesh.device
            nothing = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
            scored = []
            for micro in self._row_plans.micro_batches(data, plan):
                tokens, lengths = micro.rows["input_ids"].to(device), micro.rows["input_lengths"].to(device)
                outputs = self._sharding.root(tokens, lengths, packed=self._row_plans.are_packed)
                if micro.is_real:
                    missing = nothing.shape[1] - outputs.logprobs.shape[1]
                    scored.append(torch.nn.functional.pad(outputs.logprobs.float().cpu(), (0, missing)))
            result: BatchedDataDict[LogprobOutputSpec] = BatchedDataDict(
                {"logprobs": torch.cat(scored) if scored else nothing}
            )
            result.reorder_data(order)
            return result

    @contextmanager
    def reference_swapped_in(self) -> Iterator[None]:
        """Inside, the model is the reference policy."""
        self._offload.check_weights("use_reference_model")
        if self._reference is None:
            raise ConfigError("this policy was made with init_reference_model=False; it has no reference policy to use")
        with span("reference"), self._reference.swapped_in():
            yield


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
        pieces = []
        for whole, copy in zip(weights, kept, strict=True):
            for ours, theirs in zip(_pieces(whole), _pieces(copy), strict=True):
                buffer = buffers[theirs.dtype][: theirs.numel()]
                pieces.append([(buffer, ours), (ours, theirs), (theirs, buffer)])  # (target, source) of each copy
        self._num_copies_in = _COPIES_PER_PIECE * len(pieces)
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
                self._copy_until(round_up(self._num_done, _COPIES_PER_PIECE))
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


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.view(-1).split(_BUFFER_ELEMENTS)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
