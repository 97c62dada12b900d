"""The Ray of this program: the one that it has, or one that is started for its collectors and ended with the last."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ADDRESS = "RAY_ADDRESS"
_STATISTICS = "RAY_USAGE_STATS_ENABLED"
_lock = threading.Lock()
_num_users = 0
_is_ours = False


@contextmanager
def connected() -> Iterator[bool]:
    """Be connected to Ray meanwhile; whether that is one that was started for this program's collectors.

    A connection that the program itself has made is used and left alone. Otherwise the cluster is joined that Ray's own
    variable RAY_ADDRESS names, as in a job that was submitted to one; if there is none, a Ray of this machine is
    started, which nobody else reaches.
    """
    import ray

    global _num_users, _is_ours
    with _lock:
        if not ray.is_initialized():
            _connect()
            _is_ours = True
        _num_users += 1
    try:
        yield _is_ours and _ADDRESS not in os.environ
    finally:
        with _lock:
            _num_users -= 1
            if _is_ours and not _num_users:
                _is_ours = False
                ray.shutdown()


def _connect() -> None:
    import ray

    if _ADDRESS in os.environ:
        ray.init(logging_level=logging.WARNING)
        return
    with _on_loopback():
        # What envs print is shown, as that of processes is; Ray's greeting is not.
        ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray that is started meanwhile has no address but that of the loopback interface, and does not report its use.

    Ray has a switch for the former, for systems with a firewall that would ask; it is read when Ray is imported, which
    may have happened.
    """
    from ray._private import ray_constants

    before, statistics = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(_STATISTICS)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[_STATISTICS] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        if statistics is None:
            del os.environ[_STATISTICS]
        else:
            os.environ[_STATISTICS] = statistics
