"""What a run saves of its parts; also the documented path of `LossFunction`, which lives in `lucidrl.losses`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lucidrl.losses.interfaces import LossFunction
from lucidrl.utils.nsys import ProfilablePolicy

if TYPE_CHECKING:
    from lucidrl.checkpoint.manifest import FileDigest

__all__ = ["Algorithm", "LossFunction", "Stateful", "TrainedPolicy"]


class Stateful(Protocol):
    """A part of a run that goes on where it was left."""

    def state_dict(self) -> Any:
        """Where it stands, as plain values."""
        ...

    def load_state_dict(self, state: Any) -> None: ...


class TrainedPolicy(Stateful, ProfilablePolicy, Protocol):
    """A policy whose weights and optimizers are files of a checkpoint, whatever it is made of.

    Its `state_dict` has `layout`, a text that tells what it runs on, and `ranks`, with the state of each; that of a
    rank which is a process of its own has its `num_threads` and `random` state under `process`.
    """

    def begin_save(self, folder: Path, *, weights_only: bool = False) -> None:
        """Copy weights (and optimizers), and write them below a checkpoint's folder while training goes on."""
        ...

    def is_save_written(self) -> bool:
        """Whether what was begun is written."""
        ...

    def finish_save(self) -> dict[Path, FileDigest]:
        """Wait until all is on disk; the files that are large, and what they have to be."""
        ...

    def load(self, folder: Path) -> None:
        """Take weights and optimizers from a checkpoint's folder, which was verified when it was found."""
        ...


class Algorithm(Stateful, Protocol):
    """A training loop with all its parts."""

    @property
    def policy(self) -> TrainedPolicy: ...

    def run(self) -> int:
        """Train until the last step or a stop request; the last completed step, which is saved."""
        ...
