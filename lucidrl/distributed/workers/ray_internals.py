"""The private names of Ray that we use, each because the public ones do not offer it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def free_by_node() -> dict[str, Mapping[str, float]]:
    """Free resources of each node, by its id; `ray.available_resources` has only their sum."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()


@contextmanager
def listening_on_loopback() -> Iterator[None]:
    """A Ray that is started meanwhile listens on the loopback interface only.

    Ray has a variable for it, but reads that when it is imported, which may have happened.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def bootstrap_address(address: str) -> str:
    """`host:port` of the cluster that an address names; `ray.init` finds out as well, but tries for minutes."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return canonicalize_bootstrap_address_or_die(address)


def resolve_loopback(host: str) -> str:
    """The host as Ray takes it: a loopback name stands for the address of this node."""
    from ray._private.services import resolve_ip_for_localhost

    return resolve_ip_for_localhost(host)


def temporary_folder() -> str | None:
    """Of the Ray that this program is connected to, if its node is this machine."""
    from ray._private.worker import _global_node

    node: Any = _global_node
    return None if node is None else node.get_temp_dir_path()


def dashboard_address() -> str | None:
    """Of the cluster that this program is connected to; Ray returns it only from `ray.init`, once."""
    from ray._private.services import get_webui_url_from_internal_kv

    return get_webui_url_from_internal_kv()
