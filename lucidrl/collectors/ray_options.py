"""What the actors of a collector ask a Ray cluster for, and whether it has that."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lucidrl.distributed.launchers.ray_resources import (
    RETURN_DEADLINE_S,
    Resources,
    described,
    free,
    free_on_nodes,
    holds,
    totals,
)
from lucidrl.errors import ConfigError

Options = Mapping[str, Any]
"""Of `ray.remote`."""

_DECIDED = (
    "allow_out_of_order_execution",
    "concurrency_groups",
    "get_if_exists",
    "lifetime",
    "max_concurrency",
    "max_pending_calls",
    "max_restarts",
    "max_task_retries",
    "name",
    "namespace",
)
"""Options that are the collector's to decide: who the actors are, how long they live, what they do in which order."""
_MARK = 0.001
"""Of a resource that says no more than which kind of accelerator a node has."""
_POLL_S = 0.1


def options_by_worker(remote_options: Options | Sequence[Options] | None, num_workers: int) -> list[Options]:
    """One mapping for each worker, from one for all or a list of them.

    Raises:
        ConfigError: if it is something else, or says what is not for it to say.
    """
    given = remote_options if isinstance(remote_options, list | tuple) else [remote_options or {}] * num_workers
    if len(given) != num_workers:
        raise ConfigError(
            f"remote_options has {len(given)} entries for {num_workers} workers; give one mapping, or one for each"
        )
    for options in given:
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"remote_options has {options!r}, which is no mapping; give options of ray.remote such as "
                '{"num_cpus": 1}'
            )
        if decided := [name for name in _DECIDED if name in options]:
            raise ConfigError(
                f"remote_options has {decided[0]}, which the collector decides; leave it out (how many workers may be "
                "replaced is its own argument max_restarts)"
            )
    return list(given)


def needs(options: Options) -> Resources:
    """What an actor with these options takes from its node."""
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    wanted = {**named, **(options.get("resources") or {})}
    if kind := options.get("accelerator_type"):
        wanted[f"accelerator_type:{kind}"] = _MARK
    return {name: float(amount) for name, amount in wanted.items() if amount}


def check_room(options: Sequence[Options], deadline_s: float) -> None:
    """Refuse actors for which the cluster has no room now, before any is started; those in a placement group have
    their room there.

    Raises:
        ConfigError: with what is asked for and what there is.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    asked = [
        needs(each)
        for each in options
        if not isinstance(each.get("scheduling_strategy"), PlacementGroupSchedulingStrategy)
    ]
    together = _sum(asked)
    nodes = list(totals().values())
    if not all(any(holds(node, each) for node in nodes) for each in asked):
        raise _no_room(len(asked), together, "no node has enough for each")
    if not hold_all(nodes, asked):
        raise _no_room(len(asked), together, "the nodes cannot hold all of them, each on one node")
    until = time.monotonic() + min(deadline_s, RETURN_DEADLINE_S)
    while not hold_all(list(free().values()), asked):
        if time.monotonic() > until:
            raise _no_room(len(asked), together, "others hold too much of the nodes, and each has to fit on one")
        time.sleep(_POLL_S)


def hold_all(nodes: Sequence[Resources], asked: Sequence[Resources]) -> bool:
    """Whether every actor finds a node that holds what it asks for beside what the others do.

    Those that fit on the fewest nodes go first, of these the largest, each to the first node with room. Where they ask
    for different things, another order might find room that this one does not; where for the same, none does.
    """
    together = _sum(asked)

    def rank(each: Resources) -> tuple[int, float]:
        largest_share = max((amount / together[name] for name, amount in each.items()), default=0.0)
        return sum(holds(node, each) for node in nodes), -largest_share

    left = [Counter(node) for node in nodes]
    for each in sorted(asked, key=rank):
        home = next((node for node in left if holds(node, each)), None)
        if home is None:
            return False
        home.subtract(each)
    return True


def _no_room(num_workers: int, together: Resources, why: str) -> ConfigError:
    return ConfigError(
        f"{num_workers} workers ask Ray for {described(together)} in all, but {why}: {free_on_nodes(together)}. Use "
        "fewer workers, or ask for less with remote_options"
    )


def _sum(parts: Sequence[Resources]) -> Resources:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
