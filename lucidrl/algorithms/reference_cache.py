"""Log-probabilities of the reference policy, computed once before training and kept in a file of the run folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import CheckpointError
from lucidrl.losses.interfaces import sampled_token_mask

FILE_NAME = "reference_logprobs.safetensors"
_KEY_BYTES = 32

Score = Callable[[BatchedDataDict[Any]], torch.Tensor]
"""Returns the log-probability of each row's completion, [B] float64."""


class CachedReference:
    """The reference policy's log-probabilities of completions, by the tokens of their rows.

    Args:
        path: the file; it is read if it exists.
        model: what the log-probabilities depend on; a file of another model is not used.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path, self._model = path, model
        self._sums = self._read() if path.exists() else {}

    def sums(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """Return the log-probability of each row's completion, [B] float64; every row must have been added."""
        return torch.tensor([self._sums[key] for key in _keys(batch)], dtype=torch.float64)

    def add(self, batches: Iterable[BatchedDataDict[Any]], score: Score) -> int:
        """Score the rows that the file lacks and write the file; return how many there were."""
        num_added = 0
        for rows in self._missing(batches):
            keys = _keys(rows)
            self._sums.update(zip(keys, score(rows).tolist(), strict=True))
            num_added += len(keys)
        if num_added:
            self._write()
        return num_added

    def _missing(self, batches: Iterable[BatchedDataDict[Any]]) -> Iterator[BatchedDataDict[Any]]:
        seen = set(self._sums)
        for batch in batches:
            rows = []
            for row, key in enumerate(_keys(batch)):
                if key not in seen:
                    seen.add(key)
                    rows.append(row)
            if rows:
                names = ("input_ids", "input_lengths", "token_mask", "sample_mask")
                yield BatchedDataDict({name: batch[name] for name in names}).select_indices(rows)

    def _read(self) -> dict[bytes, float]:
        try:
            with safe_open(self.path, framework="pt") as file:
                if (file.metadata() or {}).get("model") != self._model:
                    return {}
                keys, sums = file.get_tensor("keys"), file.get_tensor("logprob_sums")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path} is damaged ({error}); delete it, and the run computes it again"
            ) from error
        return {bytes(key.numpy()): value for key, value in zip(keys, sums.tolist(), strict=True)}

    def _write(self) -> None:
        keys = torch.frombuffer(bytearray(b"".join(self._sums)), dtype=torch.uint8).view(-1, _KEY_BYTES)
        sums = torch.tensor(list(self._sums.values()), dtype=torch.float64)
        partial = self.path.with_name(f".{self.path.name}.partial")
        save_file({"keys": keys, "logprob_sums": sums}, partial, metadata={"model": self._model})
        os.replace(partial, self.path)


def _keys(batch: BatchedDataDict[Any]) -> list[bytes]:
    """Return a hash of each row's tokens and of which of them count."""
    mask_BT = sampled_token_mask(batch)
    return [
        hashlib.sha256(ids[:length].numpy().tobytes() + mask[:length].numpy().tobytes()).digest()
        for ids, mask, length in zip(batch["input_ids"], mask_BT, batch["input_lengths"].tolist(), strict=True)
    ]
