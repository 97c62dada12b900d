"""What the actors of a collector ask a Ray cluster for, and whether it has that."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lucidrl.errors import ConfigError

Options = Mapping[str, Any]
"""Of `ray.remote`."""

_DECIDED = ("lifetime", "max_concurrency", "max_restarts", "max_task_retries")
"""Options that are the collector's to decide."""
_MOST_WAIT_S = 8.0
"""What others just gave back takes a moment to be counted as free."""
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
                f"remote_options has {decided[0]}, which the collector decides; leave it out, and say with the "
                "argument max_restarts how many workers may be replaced"
            )
    return list(given)


def needs(options: Options) -> dict[str, float]:
    """What an actor with these options takes from its node."""
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    wanted = {**named, **(options.get("resources") or {})}
    return {name: float(amount) for name, amount in wanted.items() if amount}


def check_room(options: Sequence[Options], deadline_s: float) -> None:
    """Refuse actors for which the cluster has no room now, before any is started; those in a placement group have
    their room there.

    Raises:
        ConfigError: with what is asked for and what there is.
    """
    import ray

    asked = [needs(each) for each in options if "scheduling_strategy" not in each]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not all(any(_fits(each, node) for node in nodes) for each in asked):
        raise _no_room(options, "no node has that much")
    together = _sum(asked)
    if not _fits(together, ray.cluster_resources()):
        raise _no_room(options, "the cluster has less")
    until = time.monotonic() + min(deadline_s, _MOST_WAIT_S)
    while not _fits(together, ray.available_resources()):
        if time.monotonic() > until:
            raise _no_room(options, "others hold the rest")
        time.sleep(_POLL_S)


def asked_and_free(asked: Mapping[str, float]) -> str:
    """For an error."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(
        f"{name} {amount:g} ({free.get(name, 0):g} of {total.get(name, 0):g} free in the cluster)"
        for name, amount in asked.items()
    )


def _no_room(options: Sequence[Options], why: str) -> ConfigError:
    return ConfigError(
        f"{len(options)} workers ask Ray for {asked_and_free(_sum([needs(each) for each in options]))}, but {why}; "
        "use fewer workers, or ask for less with remote_options"
    )


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _fits(asked: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(amount <= there.get(name, 0) + 1e-4 for name, amount in asked.items())  # as finely as Ray counts
