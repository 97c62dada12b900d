"""A loss function of your own: REINFORCE without clipping, plus an entropy bonus.

python examples/own_loss.py

A loss declares what it needs from the model and returns its micro-batch's share of the global loss. It divides by the
global counts, so the result does not depend on micro-batches, packing or the number of ranks. With several ranks it is
sent to them, so it must be a class or function of a module.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from grpo_from_parts import train

from lucidrl.losses.interfaces import LossType, TokenOutputs, valid_token_mask
from lucidrl.losses.reductions import Max, Mean, Metrics, Sum
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.policy.config import OptimizerConfig, PolicyConfig


class ReinforceLoss:
    """-advantage * log-probability - coefficient * entropy, averaged over the valid tokens.

    Shapes: B rows, T tokens.
    """

    loss_type = LossType.TOKEN_LEVEL
    needs = frozenset({"logprobs", "entropy"})

    def __init__(self, entropy_coefficient: float = 0.01):
        self.entropy_coefficient = entropy_coefficient

    def __call__(
        self,
        outputs: TokenOutputs,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        mask_BT = valid_token_mask(data)
        advantages_BT = data["advantages"][:, None].expand_as(mask_BT)
        objective_BT = advantages_BT * outputs.logprobs + self.entropy_coefficient * outputs.entropy
        loss = -objective_BT.masked_fill(~mask_BT, 0).sum() / global_valid_toks
        entropies = outputs.entropy.detach()[mask_BT]
        metrics = {
            "num_valid_tokens": Sum(mask_BT.sum()),  # added up over micro-batches and ranks
            "entropy": Mean(entropies.sum() / max(len(entropies), 1), weight=mask_BT.sum()),  # a mean over all tokens
            "max_logprob": Max(outputs.logprobs.detach().masked_fill(~mask_BT, -torch.inf).max()),
        }
        return loss, metrics


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args(argv)
    config = PolicyConfig(
        model_name="embedded",
        optimizer=OptimizerConfig(kwargs={"lr": 1e-4}),
        generation=GenerationConfig(max_new_tokens=8),
    )
    train(config, ReinforceLoss(), args.steps)


if __name__ == "__main__":
    main()
