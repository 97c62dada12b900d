"""Protocols of the components of a run. `LossFunction` of `lucidrl.losses` is documented under this path too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lucidrl.losses.interfaces import LossFunction
from lucidrl.utils.nsys import ProfilablePolicy

if TYPE_CHECKING:
    from lucidrl.checkpoint.manifest import FileDigest

__all__ = ["Algorithm", "LossFunction", "Stateful", "TrainedPolicy"]


class Stateful(Protocol):
    """A component of a run whose state is saved and restored."""

    def state_dict(self) -> Any:
        """Return the state as plain values."""
        ...

    def load_state_dict(self, state: Any) -> None: ...


class TrainedPolicy(Stateful, ProfilablePolicy, Protocol):
    """A policy that the training loop saves, restores and profiles.

    The result of `state_dict` has two keys: `layout` describes the ranks, and `ranks` lists the state of each rank. The
    state of a rank that runs in a worker process has `num_threads` and `random` under `process`.
    """

    def reserve_save(self, folder: Path, *, weights_only: bool = False) -> bool:
        """Allocate the memory of `begin_save` in the background; False if its size is not known yet."""
        ...

    def begin_save(self, folder: Path, *, weights_only: bool = False) -> None:
        """Copy weights and, unless `weights_only`, optimizers; write the copies to `folder` in the background."""
        ...

    def is_save_written(self) -> bool:
        """Return whether the background write is done."""
        ...

    def finish_save(self) -> dict[Path, FileDigest]:
        """Wait until all files are on disk; return the large files with their digests."""
        ...

    def load(self, folder: Path) -> None:
        """Load weights and optimizers from the folder of a verified checkpoint."""
        ...


class Algorithm(Stateful, Protocol):
    """A training algorithm with the components of its run."""

    @property
    def policy(self) -> TrainedPolicy: ...

    def run(self) -> int:
        """Train until the last step or a stop request; save and return the last completed step."""
        ...
