"""The small interface that every collector answers, whatever it collects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

BatchT = TypeVar("BatchT", covariant=True)


class CollectorInterface(Protocol[BatchT]):
    """Gathers batches of experience with the policy's newest weights."""

    def __iter__(self) -> Iterator[BatchT]:
        """Batches, one after the other."""
        ...

    def update_policy_weights_(self, *, version: int) -> None:
        """From the next batch on, collect with this version of the weights."""
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
