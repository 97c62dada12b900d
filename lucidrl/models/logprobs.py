"""Log-probabilities of tokens; scoring, training and generation all use this module.

`LogprobModel` wraps a Hugging Face model. It is the root module for sharding, so the head's weights are only gathered
inside its `forward`. Temperature, logit scaling and soft-capping are applied here and nowhere else.

Shapes: B rows, T tokens, N selected tokens, U selected tokens that are computed, D hidden size, V vocabulary,
K candidates.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from lucidrl.distributed.batching import round_up
from lucidrl.distributed.packing import PackedRows, gather_rows, pack_rows
from lucidrl.distributed.prefix_tree import PrefixTree, share_prefixes
from lucidrl.errors import ConfigError
from lucidrl.losses.interfaces import Need, TokenOutputs
from lucidrl.models.attention import AttentionLayout, PackedLayout, PaddedLayout, TreeLayout
from lucidrl.models.candidates import candidate_logprobs, top_logprobs
from lucidrl.models.context_parallel import ContextParallel
from lucidrl.models.head import LogitTransform, gathered_logits, token_logprobs

OF_LANGUAGE_MODELS: frozenset[Need] = frozenset({"logprobs", "entropy", "logits", "candidates"})
"""Outputs of a language model; a reward model returns `values` alone."""


class LogprobModel(nn.Module):
    """A causal language model that returns log-probabilities instead of logits.

    Args:
        recompute_head: keep no logits for the backward pass.
        tp_group: ranks that split the vocabulary, if the model is tensor parallel.
        context: splits the tokens of rows over ranks; each rank gets the results of all tokens.
        length_multiple: pad rows to a multiple of this length.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        recompute_head: bool = False,
        tp_group: ProcessGroup | None = None,
        context: ContextParallel | None = None,
        length_multiple: int = 1,
    ):
        super().__init__()
        self.model = model
        self.transform = logit_transform(model.config, temperature)
        self.recompute_head = recompute_head
        self.tp_group = tp_group
        self.context = context
        self.length_multiple = length_multiple * (context.multiple if context is not None else 1)
        self.num_computed_tokens = 0
        """Tokens of all forward passes so far, padding included; of all ranks that split the rows."""
        is_reward_model = model.get_output_embeddings() is None
        self.supported_needs: frozenset[Need] = frozenset({"values"}) if is_reward_model else OF_LANGUAGE_MODELS
        self._default_needs: frozenset[Need] = frozenset({"values" if is_reward_model else "logprobs"})
        self.train(model.training)  # a new module is in training mode

    def forward(
        self,
        input_ids: torch.Tensor,
        input_lengths: torch.Tensor,
        needs: Set[Need] | None = None,
        selected: torch.Tensor | None = None,
        packed: bool = False,
        shared: bool = False,
        candidate_ids: torch.Tensor | None = None,
        top: tuple[int, int] | None = None,
    ) -> TokenOutputs:
        """Compute outputs for right-padded rows.

        Args:
            input_ids: [B, T].
            input_lengths: [B] on the same device.
            needs: which outputs to compute; by default the log-probabilities, or the values of a reward model.
            selected: [B, T] bool, the tokens to score; all by default. Log-probabilities and entropies of other tokens
                are 0.
            packed: run the model on packed rows, without padding; outputs are padded rows nevertheless.
            shared: run the model once on tokens that rows have in common, if there are any, and on all others without
                padding.
            candidate_ids: [B, T, K], the candidates.
            top: (K, number of ids); without `candidate_ids`, the K likeliest of these ids are the candidates, and
                outputs have no gradient.
        """
        needs = self._default_needs if needs is None else needs
        if not needs <= self.supported_needs:
            kind = "reward" if self.supported_needs == {"values"} else "language"
            raise ConfigError(
                f"the loss needs {sorted(needs - self.supported_needs)}, but a {kind} model only returns "
                f"{sorted(self.supported_needs)}; change the loss's `needs`"
            )
        rows: PackedRows | PrefixTree | None = share_prefixes(input_ids, input_lengths) if shared else None
        if rows is None and packed:
            rows = pack_rows(input_ids, input_lengths)
        hidden = self._hidden(input_ids, rows)
        if "values" in needs:
            scores = self._score_head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
            return TokenOutputs(values=self._of_positions(scores, rows, input_ids.shape)[..., 0])
        logits = None
        if "logits" in needs:
            logits = self._of_positions(self.next_token_logits(hidden), rows, input_ids.shape)
        if not needs & {"logprobs", "entropy", "candidates"}:
            return TokenOutputs(logits=logits)
        chosen = self._choose(hidden, input_ids, input_lengths, rows, selected)
        found = TokenOutputs()
        if "candidates" in needs:
            found = self._candidates(chosen, candidate_ids, top)
        if "entropy" in needs or "candidates" not in needs:
            scored = token_logprobs(
                chosen.predictors_U,
                self.head,
                chosen.targets_U,
                self.transform,
                with_entropy="entropy" in needs,
                recompute=self.recompute_head,
                group=self.tp_group,
            )
            logprobs, entropy = chosen.per_token(scored.logprobs), chosen.per_token(scored.entropy)
            found = replace(found, logprobs=logprobs, entropy=entropy)

        def laid_out(values_N: torch.Tensor | None) -> torch.Tensor | None:
            if values_N is None:
                return None
            empty = values_N.new_zeros(*input_ids.shape, *values_N.shape[1:])
            values_BT = empty.index_put((chosen.row_N, chosen.position_N), values_N)
            return values_BT if self.context is None else self.context.sum(values_BT)

        return TokenOutputs(
            logprobs=laid_out(found.logprobs),
            entropy=laid_out(found.entropy),
            logits=logits,
            candidates=laid_out(found.candidates),
            candidate_ids=laid_out(found.candidate_ids),
        )

    def _choose(
        self,
        hidden: torch.Tensor,
        input_ids: torch.Tensor,
        input_lengths: torch.Tensor,
        rows: PackedRows | PrefixTree | None,
        selected: torch.Tensor | None,
    ) -> _Chosen:
        """Find the tokens to score among those whose predictor this rank has."""
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        wanted = (position > 0) & (position < input_lengths[:, None])
        if selected is not None:
            wanted &= selected
        # The hidden state at the previous position predicts a token; it may be on another rank.
        slot_of_position = self._slots(input_ids.shape[1], input_ids.device)
        wanted[:, 1:] &= slot_of_position[:-1] >= 0
        row_N, position_N = wanted.nonzero(as_tuple=True)
        if isinstance(rows, PrefixTree):
            token_U, slot_N = torch.unique(rows.slots[row_N, position_N], return_inverse=True)
            # Tokens that follow the same token have the same predictor, whose gradient is a sum.
            predictors_U = hidden.index_select(0, rows.previous[token_U])
            return _Chosen(row_N, position_N, predictors_U, rows.input_ids[0, token_U], slot_N)
        if rows is not None:
            predictor_N = rows.cu_seqlens[row_N].to(torch.int64) + position_N - 1
        else:
            predictor_N = row_N * (len(hidden) // len(input_ids)) + slot_of_position[position_N - 1]
        return _Chosen(row_N, position_N, gather_rows(hidden, predictor_N), input_ids[row_N, position_N])

    def _candidates(
        self, chosen: _Chosen, candidate_ids: torch.Tensor | None, top: tuple[int, int] | None
    ) -> TokenOutputs:
        """Score the candidates of each chosen token, which may differ between rows that share the token."""
        predictors_N = chosen.per_token(chosen.predictors_U)
        if candidate_ids is not None:
            ids_NK = candidate_ids[chosen.row_N, chosen.position_N].to(torch.int64)
            targets_N = chosen.per_token(chosen.targets_U)
            return candidate_logprobs(predictors_N, self.head, targets_N, ids_NK, self.transform, group=self.tp_group)
        assert top is not None, "candidates are given, or counted"
        assert self.tp_group is None, "a teacher is not tensor parallel"
        ids_NK, candidates_NK = top_logprobs(predictors_N, self.head, *top, self.transform)
        return TokenOutputs(candidates=candidates_NK, candidate_ids=ids_NK)

    @property
    def _score_head(self) -> nn.Module:
        return self.model.get_submodule("score")

    @property
    def head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    def hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, layout: AttentionLayout
    ) -> torch.Tensor:
        """Return the last hidden states, flattened to [tokens, D]."""
        self.num_computed_tokens += input_ids.numel() * (1 if self.context is None else self.context.size)
        decoder = self.model.base_model
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, layout=layout)
        return output.last_hidden_state.flatten(0, 1)

    def next_token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] of hidden states [N, D], in at least float32, after scale, cap and temperature."""
        if self.tp_group is None:
            return self.transform(self.head(hidden))
        return self.transform(gathered_logits(hidden, self.head))

    def _hidden(self, input_ids: torch.Tensor, rows: PackedRows | PrefixTree | None) -> torch.Tensor:
        """Return the last hidden states of this rank's tokens, [tokens, D]."""
        if rows is not None:
            layout = TreeLayout(rows) if isinstance(rows, PrefixTree) else PackedLayout(rows)
            return self.hidden_states(rows.input_ids, rows.position_ids, layout)
        padded = nn.functional.pad(input_ids, (0, -input_ids.shape[1] % self.length_multiple))
        position_ids = self._own_positions(padded.shape[1], padded.device).expand(len(padded), -1)
        if self.context is None:
            return self.hidden_states(padded, position_ids, PaddedLayout())
        return self.hidden_states(padded.gather(1, position_ids), position_ids, self.context)

    def _own_positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's tokens in padded rows."""
        if self.context is None:
            return torch.arange(length, device=device)
        return self.context.positions(length, device)

    def _slots(self, length: int, device: torch.device) -> torch.Tensor:
        """Return [T], the index of each position in this rank's hidden states; -1 for positions of other ranks."""
        padded_length = round_up(length, self.length_multiple)
        own = self._own_positions(padded_length, device)
        slots = torch.full((padded_length,), -1, device=device)
        slots[own] = torch.arange(len(own), device=device)
        return slots[:length]

    def _of_positions(
        self, values: torch.Tensor, rows: PackedRows | PrefixTree | None, shape: torch.Size
    ) -> torch.Tensor:
        """Lay out values of this rank's hidden states, such as logits, as [B, T, ...]."""
        if rows is not None:
            return rows.unpack(values)
        values = values.unflatten(0, (shape[0], -1))
        if self.context is None:
            return values[:, : shape[1]]
        whole = values.new_zeros(shape[0], round_up(shape[1], self.length_multiple), values.shape[-1])
        own = self._own_positions(whole.shape[1], whole.device)
        return self.context.sum(whole.index_copy(1, own, values))[:, : shape[1]]


@dataclass(frozen=True)
class _Chosen:
    """The tokens to score."""

    row_N: torch.Tensor
    position_N: torch.Tensor
    predictors_U: torch.Tensor
    """[U, D]"""
    targets_U: torch.Tensor
    slot_N: torch.Tensor | None = None
    """Which of the U computed tokens each token is, if rows share tokens; otherwise they are the same."""

    @overload
    def per_token(self, values_U: torch.Tensor) -> torch.Tensor: ...
    @overload
    def per_token(self, values_U: None) -> None: ...
    def per_token(self, values_U: torch.Tensor | None) -> torch.Tensor | None:
        """Return one value for each token to score."""
        return values_U if values_U is None or self.slot_N is None else values_U.index_select(0, self.slot_N)


def logit_transform(config: Any, temperature: float) -> LogitTransform:
    """Return the logit transform that the model's config declares, with the temperature."""
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0
    divisor = getattr(text, "logits_scaling", None) or 1.0
    return LogitTransform(scale / divisor, getattr(text, "final_logit_softcapping", None), temperature)
