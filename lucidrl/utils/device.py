"""The device of this process."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """The accelerator of this process if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
