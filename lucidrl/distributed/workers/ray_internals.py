"""All uses of Ray's private names; for each, Ray has no public name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def free_by_node() -> dict[str, Mapping[str, float]]:
    """Free resources per node id; `ray.available_resources` returns only the sum over all nodes."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()


@contextmanager
def listening_on_loopback() -> Iterator[None]:
    """Context manager: `ray.init` inside it starts a cluster that listens on the loopback interface only.

    Ray has an environment variable for this, but reads it at import, which may have happened before.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def bootstrap_address(address: str) -> str:
    """Resolve an address such as `auto` to `host:port`; `ray.init` would do so too, but retries for minutes."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return canonicalize_bootstrap_address_or_die(address)


def resolve_loopback(host: str) -> str:
    """Resolve a host as Ray does: a loopback name means the address of this node."""
    from ray._private.services import resolve_ip_for_localhost

    return resolve_ip_for_localhost(host)


def temporary_folder() -> str | None:
    """Temporary folder of the cluster that this program is connected to; None if Ray has no node on this machine."""
    from ray._private.worker import _global_node

    node: Any = _global_node
    return None if node is None else node.get_temp_dir_path()


def dashboard_address() -> str | None:
    """Dashboard address of the cluster that this program is connected to; publicly, only `ray.init` returns it."""
    from ray._private.services import get_webui_url_from_internal_kv

    return get_webui_url_from_internal_kv()
