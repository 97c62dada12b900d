"""Model code that is float64 throughout, so that equal computations can be told from similar ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside the context, float64 tensors are not converted to float32, as the norms of many architectures do."""
    to, to_float = torch.Tensor.to, torch.Tensor.float

    def converted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.dtype == torch.float64 and (torch.float32 in args or kwargs.get("dtype") == torch.float32):
            return tensor
        return to(tensor, *args, **kwargs)

    def as_float(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float(tensor, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "to", converted), mock.patch.object(torch.Tensor, "float", as_float):
        yield
