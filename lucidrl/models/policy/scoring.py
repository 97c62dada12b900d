"""Log-probabilities of rows under the current weights or the reference policy.

The reference policy has the weights that the run started from; scoring swaps these weights in temporarily. With LoRA it
is the model without its adapters, and needs no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.batching import inverse_permutation, round_up
from lucidrl.errors import ConfigError
from lucidrl.losses.interfaces import Need, sampled_token_mask
from lucidrl.models.generation.mismatch import Sampling, logprobs_under, mean_difference, num_excluded
from lucidrl.models.lora import adapted_layers, adapters_at, merged_in_forward
from lucidrl.models.policy.interfaces import LogprobOutputSpec
from lucidrl.models.policy.offload import Offload
from lucidrl.models.policy.row_plans import RowPlans
from lucidrl.models.policy.sharding import Sharding
from lucidrl.profiling.spans import span

_BUFFER_ELEMENTS = 1 << 22
_COPIES_PER_PIECE = 3
_EXPLAINED_TOKENS = 64
"""Tokens whose logits are compared under other samplings at a time."""


class Scorer:
    """Scores this rank's rows, in lock-step with the other ranks.

    Args:
        has_reference: keep a copy of the current weights as the reference policy; not needed with LoRA.
    """

    def __init__(self, sharding: Sharding, row_plans: RowPlans, offload: Offload, *, has_reference: bool):
        self._sharding, self._row_plans, self._offload = sharding, row_plans, offload
        self._reference = _reference(sharding) if has_reference else None

    @torch.no_grad()
    def logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None, of_reference: bool = False
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """See `PolicyWorker.get_logprobs`; results are on the CPU, in row order."""
        # `reference_swapped_in` has a span too.
        with self.reference_swapped_in() if of_reference else span("logprobs"):
            self._offload.check_weights("get_logprobs")
            plan, order = self._row_plans.for_scoring(data, micro_batch_size)
            device = self._sharding.mesh.device
            unscored = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
            scored = []
            for micro in self._row_plans.micro_batches(data, plan):
                tokens, lengths = micro.rows["input_ids"].to(device), micro.rows["input_lengths"].to(device)
                shared = self._row_plans.share_prefixes
                outputs = self._sharding.root(tokens, lengths, packed=micro.is_packed, shared=shared)
                if micro.is_real:
                    missing = unscored.shape[1] - outputs.logprobs.shape[1]
                    scored.append(torch.nn.functional.pad(outputs.logprobs.float().cpu(), (0, missing)))
            return BatchedDataDict({"logprobs": torch.cat(scored)[order] if scored else unscored})

    @torch.no_grad()
    def values(self, data: BatchedDataDict[Any]) -> torch.Tensor:
        """Return the scores of a reward model, [B] float32; `token_mask` marks the scored token of each row."""
        with span("logprobs"):
            self._offload.check_weights("values")
            plan, order = self._row_plans.for_scoring(data, None)
            scored = [torch.zeros(0)]
            for micro in self._row_plans.micro_batches(data, plan):
                batch, shared = micro.rows.to(self._sharding.mesh.device), self._row_plans.share_prefixes
                needs: frozenset[Need] = frozenset({"values"})
                outputs = self._sharding.root(
                    batch["input_ids"], batch["input_lengths"], needs, packed=micro.is_packed, shared=shared
                )
                if micro.is_real:
                    values_B = outputs.values.masked_fill(~batch["token_mask"].bool(), 0).sum(dim=1)
                    scored.append(values_B.float().cpu())
            return torch.cat(scored)[order]

    @torch.no_grad()
    def top_logprobs(self, data: BatchedDataDict[Any], top_k: int, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of the likeliest tokens in place of each sampled token, and their log-probabilities.

        The ids are [B, T, K] int32, the log-probabilities [B, T, K + 1] float32, with all other tokens together last;
        both are 0 where `sampled_token_mask` is.

        Args:
            num_ids: only these first ids are returned; a model may have more ids than its tokenizer has tokens.
        """
        with span("logprobs"):
            self._offload.check_weights("top_logprobs")
            plan, order = self._row_plans.for_scoring(data, None)
            ids = torch.zeros(*data["input_ids"].shape, top_k, dtype=torch.int32)
            logprobs = torch.zeros(*data["input_ids"].shape, top_k + 1)
            rows = inverse_permutation(order)
            for micro in self._row_plans.micro_batches(data, plan):
                batch = micro.rows.to(self._sharding.mesh.device)
                outputs = self._sharding.root(
                    batch["input_ids"],
                    batch["input_lengths"],
                    frozenset({"candidates"}),
                    selected=sampled_token_mask(batch),
                    packed=micro.is_packed,
                    shared=self._row_plans.share_prefixes,
                    top=(top_k, num_ids),
                )
                if micro.is_real:
                    own, rows = rows[: micro.rows.size], rows[micro.rows.size :]
                    ids[own, : outputs.candidates.shape[1]] = outputs.candidate_ids.int().cpu()
                    logprobs[own, : outputs.candidates.shape[1]] = outputs.candidates.float().cpu()
            return ids, logprobs

    @span("guard")
    @torch.no_grad()
    def probe(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return [B, T], the log-probabilities of a few rows; call it on every rank, with the same rows."""
        return self._outputs_of(input_ids, lengths, "logprobs").float().cpu()

    @span("guard")
    @torch.no_grad()
    def explanations(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        selected: torch.Tensor,
        samplings: Sequence[Sampling],
        setting: Sampling,
        slack: float,
    ) -> tuple[torch.Tensor, int]:
        """Score tokens of a few rows under other samplings; call it on every rank, with the same rows.

        Args:
            selected: [B, T] bool, the N tokens to score.
            setting: the configured sampling.

        Returns:
            `logprobs_under` [S, N], with the tokens in row order, and `num_excluded`.
        """
        found, excluded = [torch.zeros(len(samplings), 0)], 0
        temperature = self._sharding.model.transform.temperature
        for row, length in enumerate(lengths.tolist()):  # the logits of all rows may not fit into memory
            tokens = input_ids[row : row + 1, :length]
            logits_TV = self._outputs_of(tokens, lengths[row : row + 1], "logits")[0, :-1]
            positions = selected[row, 1:length].nonzero()[:, 0].to(logits_TV.device)
            for part in positions.split(_EXPLAINED_TOKENS):
                logits_NV, targets_N = logits_TV[part] * temperature, tokens[0, 1:].to(part.device)[part]
                excluded += num_excluded(logits_NV, targets_N, setting, slack)
                found.append(logprobs_under(logits_NV, targets_N, samplings).cpu())
        return torch.cat(found, dim=1), excluded

    @span("guard")
    @torch.no_grad()
    def probe_adapters(
        self, input_ids: torch.Tensor, lengths: torch.Tensor, strengths: Sequence[float]
    ) -> list[torch.Tensor]:
        """Return `probe` with adapters at each strength; see `adapters_at`."""
        found = []
        for strength in strengths:
            with adapters_at(self._sharding.model, strength):
                found.append(self.probe(input_ids, lengths))
        return found

    @span("guard")
    @torch.no_grad()
    def merge_gap(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> float:
        """Return the mean absolute difference of a row's log-probabilities between merged and separate adapters."""
        separate_BT = self.probe(input_ids, lengths)
        with merged_in_forward(self._sharding.model):
            merged_BT = self.probe(input_ids, lengths)
        is_token_BT = torch.arange(1, separate_BT.shape[1]) < lengths[:, None].cpu()
        return mean_difference(merged_BT[:, 1:][is_token_BT], separate_BT[:, 1:][is_token_BT])

    def _outputs_of(self, input_ids: torch.Tensor, lengths: torch.Tensor, need: Need) -> torch.Tensor:
        self._offload.check_weights("get_logprobs")
        device = self._sharding.mesh.device
        outputs = self._sharding.root(input_ids.to(device), lengths.to(device), frozenset({need}))
        value: torch.Tensor = getattr(outputs, need)
        return value

    @contextmanager
    def reference_swapped_in(self) -> Iterator[None]:
        """Context in which the model has the reference weights."""
        self._offload.check_weights("use_reference_model")
        if self._reference is None:
            raise ConfigError(
                "this policy has no reference model, because it was created with init_reference_model=False; "
                "create it with init_reference_model=True"
            )
        with span("reference"), self._reference.swapped_in():
            yield


class WithoutAdapters:
    """The reference policy of a model with adapters: the same model without them."""

    def __init__(self, model: torch.nn.Module):
        self._model = model

    def swapped_in(self) -> AbstractContextManager[None]:
        """Context in which the model has the reference weights."""
        return adapters_at(self._model, 0)


def _reference(sharding: Sharding) -> ReferencePolicy | WithoutAdapters:
    if adapted_layers(sharding.model):
        return WithoutAdapters(sharding.model)
    return ReferencePolicy(sharding.local_weights())


class ReferencePolicy:
    """Holds a copy of a model's weights in host memory (pinned for a GPU) and swaps it in.

    The swap goes piece by piece through a small buffer, so there is never a third copy of the model. All copy
    operations form one list, and a counter records the completed ones. A copy can be repeated until the next one
    starts, so an interrupted swap can always continue.

    Args:
        weights: the tensors that the model computes with; swapped in place.
    """

    def __init__(self, weights: Sequence[torch.Tensor]):
        kept = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor) for tensor in weights]
        largest = min(max((tensor.numel() for tensor in kept), default=0), _BUFFER_ELEMENTS)
        is_pinned = any(tensor.is_pinned() for tensor in kept)
        dtypes = {tensor.dtype for tensor in kept}
        buffers = {dtype: torch.empty(largest, dtype=dtype, pin_memory=is_pinned) for dtype in dtypes}
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
        """Context in which the model has the reference weights. The exit restores the weights, even after an exception.

        Entering the context again, inside it, has no effect.
        """
        if self._num_done == self._num_copies_in:
            yield
            return
        self._restore()  # completes an earlier restore that failed
        try:
            try:
                self._copy_until(self._num_copies_in)
                yield
            finally:
                self._restore()
        finally:
            self._restore()  # only has an effect if an interrupt prevented the restore above

    def _restore(self) -> None:
        """Swap the trained weights back, from any state; raise a KeyboardInterrupt only afterwards."""
        try:
            if self._num_done < self._num_copies_in:
                self._copy_until(round_up(self._num_done, _COPIES_PER_PIECE))
                # Pieces go back in reverse order; skip those that were never swapped in.
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
