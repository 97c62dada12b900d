"""Protocols of the parts of a run; also the documented path of `LossFunction` of `lucidrl.losses`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lucidrl.losses.interfaces import LossFunction
from lucidrl.utils.nsys import ProfilablePolicy

if TYPE_CHECKING:
    from lucidrl.checkpoint.manifest import FileDigest

__all__ = ["Algorithm", "LossFunction", "Stateful", "TrainedPolicy"]


class Stateful(Protocol):
    """A part of a run whose state is saved and restored."""

    def state_dict(self) -> Any:
        """Return the state as plain values."""
        ...

    def load_state_dict(self, state: Any) -> None: ...


class TrainedPolicy(Stateful, ProfilablePolicy, Protocol):
    """A policy that the training loop saves, restores and profiles.

    Its `state_dict` has `layout`, a description of its ranks, and `ranks`, the state of each; a rank in its own process
    has its `num_threads` and `random` state under `process`.
    """

    def begin_save(self, folder: Path, *, weights_only: bool = False) -> None:
        """Copy weights (and optimizers), and write them to a checkpoint's folder in the background."""
        ...

    def is_save_written(self) -> bool:
        """Whether the background write is done."""
        ...

    def finish_save(self) -> dict[Path, FileDigest]:
        """Wait until all is on disk; return the large files with their digests."""
        ...

    def load(self, folder: Path) -> None:
        """Load weights and optimizers from the folder of a verified checkpoint."""
        ...


class Algorithm(Stateful, Protocol):
    """A training algorithm with all its parts."""

    @property
    def policy(self) -> TrainedPolicy: ...

    def run(self) -> int:
        """Train until the last step or a stop request; return the last completed step, which is saved."""
        ...
