"""The one path from tokens to log-probabilities: scoring, training and generation all run through this module.

`LogprobModel` wraps a Hugging Face model and is the root that parallelism wraps in turn: the head is only ever called
inside its `forward`. Temperature, logit scaling and soft-capping are applied here and nowhere else.

Shapes: B rows, T tokens, N selected tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lucidrl.algorithms.interfaces import Need, TokenOutputs
from lucidrl.distributed.packing import PackedRows, gather_rows, pack_rows
from lucidrl.errors import ConfigError
from lucidrl.models.attention import AttentionLayout, PackedLayout, PaddedLayout
from lucidrl.models.head import LogitTransform, token_logprobs

SUPPORTED_NEEDS = frozenset({"logprobs", "entropy", "logits"})


class LogprobModel(nn.Module):
    """A causal language model that answers with log-probabilities instead of logits."""

    def __init__(self, model: PreTrainedModel, temperature: float, recompute_head: bool = False):
        super().__init__()
        self.model = model
        self.transform = logit_transform(model.config, temperature)
        self.recompute_head = recompute_head
        self.train(model.training)  # a new module is in training mode, whatever it is made of

    def forward(
        self,
        input_ids: torch.Tensor,
        input_lengths: torch.Tensor,
        needs: Set[Need] = frozenset({"logprobs"}),
        selected: torch.Tensor | None = None,
        packed: bool = False,
    ) -> TokenOutputs:
        """Outputs for right-padded rows.

        Args:
            input_ids: [B, T].
            input_lengths: [B] on the same device.
            needs: what to compute.
            selected: [B, T] bool, the tokens to score; all by default. Other positions hold 0.
            packed: run the model on the tokens alone, without the padding; the results are laid out the same.
        """
        if not needs <= SUPPORTED_NEEDS:
            raise ConfigError(
                f"the loss needs {sorted(needs - SUPPORTED_NEEDS)}, which a model with the policy role has not; "
                f"it offers {sorted(SUPPORTED_NEEDS)}"
            )
        rows = pack_rows(input_ids, input_lengths) if packed else None
        hidden = self._hidden(input_ids, rows)
        logits = self._logits_of_rows(hidden, rows, input_ids.shape) if "logits" in needs else None
        if not needs & {"logprobs", "entropy"}:
            return TokenOutputs(logits=logits)

        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        wanted = (position > 0) & (position < input_lengths[:, None])
        if selected is not None:
            wanted &= selected
        row_N, position_N = wanted.nonzero(as_tuple=True)
        token_N = row_N * input_ids.shape[1] + position_N
        # The hidden state that predicts a token is the one before it.
        predictor_N = (token_N if rows is None else rows.cu_seqlens[row_N].to(torch.int64) + position_N) - 1
        scored = token_logprobs(
            gather_rows(hidden, predictor_N),
            self.head,
            input_ids.flatten()[token_N],
            self.transform,
            with_entropy="entropy" in needs,
            recompute=self.recompute_head,
        )

        def laid_out(values_N: torch.Tensor | None) -> torch.Tensor | None:
            if values_N is None:
                return None
            return values_N.new_zeros(input_ids.numel()).index_copy(0, token_N, values_N).view(input_ids.shape)

        return TokenOutputs(logprobs=laid_out(scored.logprobs), entropy=laid_out(scored.entropy), logits=logits)

    @property
    def head(self) -> nn.Linear:
        return self.model.get_output_embeddings()  # type: ignore[return-value]

    def hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, layout: AttentionLayout
    ) -> torch.Tensor:
        """Last hidden states, flattened to [tokens, D]."""
        decoder = self.model.base_model
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, layout=layout)
        return output.last_hidden_state.flatten(0, 1)

    def next_token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] → [N, V] in at least float32, scaled, capped and divided by the temperature."""
        return self.transform(self.head(hidden))

    def _hidden(self, input_ids: torch.Tensor, rows: PackedRows | None) -> torch.Tensor:
        if rows is not None:
            return self.hidden_states(rows.input_ids, rows.position_ids, PackedLayout(rows))
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self.hidden_states(input_ids, position_ids, PaddedLayout())

    def _logits_of_rows(self, hidden: torch.Tensor, rows: PackedRows | None, shape: torch.Size) -> torch.Tensor:
        logits = self.next_token_logits(hidden)
        return logits.view(*shape, -1) if rows is None else rows.unpack(logits)


def logit_transform(config: Any, temperature: float) -> LogitTransform:
    """What the architecture does to its logits, as its config states it, and the temperature."""
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0
    divisor = getattr(text, "logits_scaling", None) or 1.0
    return LogitTransform(scale / divisor, getattr(text, "final_logit_softcapping", None), temperature)
