"""Write losses and gradients of TRL's trainers to tests/unit/losses/trl_losses.json, for the tests to compare with.

    python tools/trl_loss_fixtures.py

It runs in the environment of the benchmarks, which has TRL (`make bench` makes it), and needs no model: TRL's loss
functions get the log-probabilities that a model would return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

TARGET = Path(__file__).parents[1] / "tests" / "unit" / "losses" / "trl_losses.json"
LENGTHS = (6, 3, 4, 1, 2, 6)
"""Sampled tokens of each row."""
MAX_LENGTH = 8
"""Divisor of Dr. GRPO."""
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": MAX_LENGTH},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "rloo": {},
}


def columns() -> dict[str, torch.Tensor]:
    """Log-probabilities and advantages in float64; rows 0, 2 and 4 are nearly on policy, as GSPO's bounds need."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = (len(LENGTHS), max(LENGTHS))
    logprobs = -normal(*size).abs() - 0.1
    spread = torch.tensor([1e-4, 0.4, 3e-4, 2.5, 1e-4, 0.4], dtype=torch.float64)[:, None]
    return {
        "logprobs": logprobs,
        "prev_logprobs": logprobs + spread * normal(*size),
        "reference_policy_logprobs": logprobs + 0.3 * normal(*size),
        "advantages": torch.tensor([1.2, -0.7, 0.4, 0.9, -1.1, 0.3], dtype=torch.float64),
        "token_mask": (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).double(),
    }


def trainer(logprobs: torch.Tensor, settings: dict[str, Any]) -> mock.MagicMock:
    """Stand in for a trainer: its settings, and a model that returns these log-probabilities."""
    made = mock.MagicMock()
    defaults = {
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
    }
    made.configure_mock(**{**defaults, **settings})
    made.args.configure_mock(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    made.accelerator.configure_mock(num_processes=1)
    for name in ("gather", "gather_for_metrics", "reduce"):
        setattr(made.accelerator, name, lambda tensor, **_: tensor)
    made._get_per_token_logps_and_entropies.return_value = (logprobs, torch.zeros_like(logprobs), None)
    return made


def result(name: str) -> dict[str, Any]:
    """Loss and gradient of TRL for the columns."""
    data = columns()
    logprobs, mask = data["logprobs"].requires_grad_(), data["token_mask"]
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        **{f"{part}_{kind}": ids for part in ("prompt", "completion") for kind in ("ids", "mask")},
        "completion_mask": mask,
        "advantages": data["advantages"],
        "old_per_token_logps": data["prev_logprobs"],
        "old_logps": (data["prev_logprobs"] * mask).sum(1),
        "ref_per_token_logps": data["reference_policy_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    compute: Callable[..., torch.Tensor] = (RLOOTrainer if name == "rloo" else GRPOTrainer)._compute_loss
    loss = compute(trainer(logprobs, SETTINGS[name]), None, inputs)
    loss.backward()
    return {"loss": loss.item(), "gradient": logprobs.grad.tolist()}


def main() -> None:
    content = {
        "trl": trl.__version__,
        "constant_length": MAX_LENGTH,
        "columns": {name: column.tolist() for name, column in columns().items()},
        "results": {name: result(name) for name in SETTINGS},
    }
    TARGET.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
