"""The small interface that every collector answers, whatever it collects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

if TYPE_CHECKING:
    from lucidrl.profiling.hook import ProfileOptions

BatchT = TypeVar("BatchT", covariant=True)


class CollectorInterface(Protocol[BatchT]):
    """Gathers batches of experience with the policy's newest weights."""

    num_workers: int

    def __iter__(self) -> Iterator[BatchT]:
        """Batches, one after the other."""
        ...

    def update_policy_weights_(self, *, version: int) -> None:
        """From the next batch on, collect with this version of the weights."""
        ...

    def enable_profile(self, **options: Unpack[ProfileOptions]) -> None:
        """Record some of the next rollouts, in the workers that make them; see `ProfileSettings` for the options."""
        ...

    def disable_profile(self) -> None:
        """Write what was recorded so far, and record no more; may be called twice."""
        ...

    def set_profiling_enabled(self, enabled: bool) -> None:
        """Show the per-frame ranges in all workers from now on, or silence them; they must be armed there."""
        ...

    def map_fn(self, name: str, list_of_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method `name` in every worker, each with its own arguments; returns one result a worker."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to collect the very next batch; plain values only."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def shutdown(self) -> None:
        """Release everything; may be called twice."""
        ...
