"""State of the global random generators of Python, numpy and torch, which user code may use.

Lucid RL's own code derives its random numbers from keys instead.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lucidrl.errors import CheckpointError


def seed_everything(seed: int, stream: int = 0) -> None:
    """Seed all global generators, including CUDA's; different streams of one seed are independent."""
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(np.frombuffer(digest, np.uint32))
    torch.manual_seed(number)


def random_state() -> dict[str, Any]:
    """The state of all global generators as plain values; `cuda` is that of the current GPU, if it is in use."""
    version, words, next_gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": {"version": version, "words": _encoded(np.array(words, np.uint32)), "next_gauss": next_gauss},
        "numpy": {
            "words": _encoded(of_numpy["state"]["key"]),
            "position": int(of_numpy["state"]["pos"]),
            "next_gauss": float(of_numpy["gauss"]) if of_numpy["has_gauss"] else None,
        },
        "torch": _encoded(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_initialized():  # else this would create a context on an unused GPU
        state["cuda"] = _encoded(torch.cuda.get_rng_state().numpy())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state from `random_state`, completely or not at all; skips a GPU's state if there is no GPU.

    Raises:
        CheckpointError: for a state of another version of Python, numpy or torch.
    """
    before = random_state()
    try:
        _set(state)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        _set(before)
        raise CheckpointError(
            f"the saved random state cannot be restored ({type(error).__name__}: {error}); "
            "resume with the versions of Python, numpy and torch that saved it"
        ) from error


def _set(state: Mapping[str, Any]) -> None:
    of_python, of_numpy = state["python"], state["numpy"]
    words = tuple(_decoded(of_python["words"], np.uint32).tolist())
    random.setstate((of_python["version"], words, _number_or_none(of_python["next_gauss"])))
    words_of_numpy, position = _decoded(of_numpy["words"], np.uint32), of_numpy["position"]
    if not 0 <= position <= len(words_of_numpy):  # numpy itself would read beyond its memory
        raise ValueError(f"position {position} lies outside of numpy's {len(words_of_numpy)} words")
    next_gauss = _number_or_none(of_numpy["next_gauss"])
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": words_of_numpy, "pos": position},
            "has_gauss": int(next_gauss is not None),
            "gauss": next_gauss or 0.0,
        }
    )
    torch.set_rng_state(torch.from_numpy(_decoded(state["torch"], np.uint8)))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_decoded(state["cuda"], np.uint8)))


def _number_or_none(value: Any) -> float | None:
    return None if value is None else float(value)


def _encoded(words: np.ndarray) -> str:
    return base64.b64encode(words.astype(words.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _decoded(text: str, dtype: type[np.unsignedinteger[Any]]) -> np.ndarray:
    little_endian = np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype).newbyteorder("<"))
    return little_endian.astype(dtype)  # also a writable copy
