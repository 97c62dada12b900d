"""Negative log-likelihood, as in supervised fine-tuning.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lucidrl.losses.interfaces import LossType, Need, TokenOutputs, valid_token_mask
from lucidrl.losses.masked import global_mean_share, token_mean, token_output
from lucidrl.losses.reductions import Metrics, Sum


class NLLLoss:
    """Mean negative log-likelihood of the valid tokens."""

    loss_type = LossType.TOKEN_LEVEL
    needs: frozenset[Need] = frozenset({"logprobs"})

    def __call__(
        self,
        outputs: TokenOutputs | torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        mask_BT = valid_token_mask(data)
        nll_BT = -token_output(outputs, "logprobs", mask_BT)
        loss = global_mean_share(nll_BT, mask_BT, self.loss_type, global_valid_seqs, global_valid_toks)
        return loss, {"nll": token_mean(nll_BT, mask_BT), "num_valid_tokens": Sum(mask_BT.sum())}
