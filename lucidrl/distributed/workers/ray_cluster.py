"""The program's single connection to Ray: all users share it, and the last user closes it.

A local cluster listens on the loopback interface only, has no dashboard, sends no usage statistics, and keeps its files
in a separate folder. An existing cluster, or a connection that the program itself made, stays as it is. A cluster whose
dashboard other machines reach without a token is joined only with `cluster.allow_open_dashboard`.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import psutil

from lucidrl.distributed.workers import ray_internals
from lucidrl.errors import ConfigError, WorkerError
from lucidrl.utils.imports import require_package

LOCAL = "local"
"""As an address: start a local cluster."""
VARIABLE = "RAY_ADDRESS"
"""As an address: use the value of this environment variable, which Ray sets in jobs submitted to a cluster."""

_CONNECT_TIMEOUT_S = 5.0
_REGISTER_TIMEOUT_S = 300
"""How long Ray waits for a new worker process of a local cluster before it starts another one; Ray's default of 60 s is
too short for a busy machine, where the replacements add to the load."""
_STATISTICS = "RAY_USAGE_STATS_ENABLED"
_TOKENS = "RAY_AUTH_MODE"
_PARENT = Path("/tmp")
"""Parent of the folders of local clusters; not TMPDIR, because the paths of Ray's sockets must be short."""
_PREFIX = "lucid-ray-"
_MOST_ATTEMPTS = 10


@dataclass
class _Connection:
    """The connection of this program to Ray, while it has users."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    is_ours: bool = False
    own_folder: OwnFolder | None = None
    """The folder of a local cluster."""
    tokens: str | None = None
    """The value of RAY_AUTH_MODE before the start of the local cluster, which changes it."""


_connection = _Connection()


@contextmanager
def connected(address: str | None, allow_open_dashboard: bool = False, shows_output: bool = False) -> Iterator[bool]:
    """Context manager: stay connected to Ray inside it; yields whether the cluster is a local one.

    Args:
        address: `host:port` of a cluster, `auto` for the cluster on this machine, `local` or None to start a local
            cluster, `RAY_ADDRESS` for the value of that variable. An existing connection is used as it is.
        allow_open_dashboard: join a cluster even if other machines reach its dashboard without a token.
        shows_output: whether the driver prints the output of actors, if this call connects.

    Raises:
        ConfigError: if Ray is not installed, no cluster is reachable at the address, the cluster's dashboard is open,
            or the program is connected to another cluster.
        WorkerError: if the local cluster does not start.
    """
    require_package("ray", "cluster.launcher=ray")
    import ray

    with _connection.lock:
        if not ray.is_initialized():
            _connect(address, allow_open_dashboard, shows_output)
        elif address != VARIABLE:
            _check_is_at(address)
        _connection.users += 1
    try:
        yield _connection.own_folder is not None
    finally:
        with _connection.lock:
            _connection.users -= 1
            if _connection.users == 0:
                _disconnect()


def _connect(address: str | None, allow_open_dashboard: bool, shows_output: bool) -> None:
    setting = "cluster.address"
    variable = os.environ.get(VARIABLE)
    if address == VARIABLE or (address == "auto" and variable):  # Ray, too, reads the variable for `auto`
        setting, address = VARIABLE, variable
    _connection.is_ours = True
    try:
        if not address or address == LOCAL:
            _connection.own_folder = OwnFolder()
            _connection.tokens = os.environ.get(_TOKENS)
            _start_on_loopback(_connection.own_folder.path, setting, shows_output)
        else:
            _join(address, setting, shows_output)
            if address == "auto":
                _check_is_for_others()
            if not allow_open_dashboard:
                _check_dashboard(address, setting)
    except BaseException:
        if _connection.own_folder is not None:
            _end_half_started(_connection.own_folder.path)
        _disconnect()
        raise


def _start_on_loopback(folder: Path, setting: str, shows_output: bool) -> None:
    import ray

    with suppress(OSError):  # Ray writes its token there, readable for all users
        Path.home().joinpath(".ray").mkdir(mode=0o700, exist_ok=True)
    statistics = os.environ.get(_STATISTICS)
    os.environ[_STATISTICS] = "0"
    try:
        with ray_internals.listening_on_loopback():
            ray.init(
                address=LOCAL,
                include_dashboard=False,
                log_to_driver=shows_output,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
                _system_config={"worker_register_timeout_seconds": _REGISTER_TIMEOUT_S},
            )
    except Exception as error:  # Ray raises plain exceptions
        raise WorkerError(
            f"Ray did not start on this machine: {_first_line(error)}; check the load and free memory of the machine, "
            f"or start a cluster with `ray start --head` and set {setting}=auto"
        ) from error
    finally:
        _restore(_STATISTICS, statistics)
    ip = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(ip).is_loopback:
        raise ConfigError(
            f"the local cluster that Ray {ray.__version__} started listens on {ip}, where other machines can reach it, "
            f"so the run stops it; if you accept that, start a cluster with `ray start --head` and set {setting}=auto"
        )


def _join(address: str, setting: str, shows_output: bool) -> None:
    import ray

    try:
        found = ray_internals.bootstrap_address(address)
        with socket.create_connection(_resolved(found), timeout=_CONNECT_TIMEOUT_S):
            pass  # Ray itself would retry for minutes
        ray.init(address=found, log_to_driver=shows_output, logging_level=logging.ERROR)
    except Exception as error:  # RuntimeError, ConnectionError, ValueError and errors of Ray
        raise ConfigError(
            f"{setting}={address} is not a reachable Ray cluster: {_first_line(error)}; start one with "
            f"`ray start --head`, run this program on a node of the cluster, or unset {setting} to start a local one"
        ) from error


def _check_is_for_others() -> None:
    """Refuse the local cluster of another run, which Ray finds by `auto` if there is no other cluster."""
    folder = ray_internals.temporary_folder()
    if folder is not None and is_own_folder(folder):
        raise ConfigError(
            "cluster.address=auto found only the local cluster of another run, which stops with that run; start a "
            "cluster with `ray start --head`, or unset cluster.address to start a local cluster"
        )


def _check_dashboard(address: str, setting: str) -> None:
    """Refuse a dashboard that other machines reach without a token."""
    dashboard = ray_internals.dashboard_address()
    if dashboard and _is_reachable(dashboard) and not _asks_for_token(dashboard):
        raise ConfigError(
            f"the dashboard of {setting}={address}, at {dashboard}, accepts connections from other machines "
            "without a token, so they can run programs on all nodes. Start the cluster with "
            "--dashboard-host=127.0.0.1, or with RAY_AUTH_MODE=token on all nodes; in a trusted network, set "
            "cluster.allow_open_dashboard=true"
        )


def _check_is_at(address: str | None) -> None:
    """Refuse an address of another cluster than the one that the program is connected to."""
    import ray

    current = ray.get_runtime_context().gcs_address
    if address in (None, LOCAL, "auto", current) or _endpoints(address) & _endpoints(current):
        return
    raise ConfigError(
        f"cluster.address={address} is not {current}, the Ray cluster that this program is connected to; set that "
        "address, unset cluster.address, or call ray.shutdown() first"
    )


def _endpoints(address: str) -> set[tuple[str, int]]:
    """Resolve an address, which may be a name, to IP addresses and ports."""
    try:
        found = socket.getaddrinfo(*_resolved(address), type=socket.SOCK_STREAM)
    except (OSError, OverflowError):  # no such name or port
        return set()
    return {(str(place[0]), int(place[1])) for *_, place in found}


def _resolved(address: str) -> tuple[str, int]:
    """Host and port; Ray replaces a loopback host by the address of this node."""
    host, _, port = address.rpartition(":")
    return ray_internals.resolve_loopback(host.strip("[]")), int(port)


def _disconnect() -> None:
    import ray

    folder, is_ours = _connection.own_folder, _connection.is_ours
    _connection.own_folder, _connection.is_ours = None, False
    try:
        if is_ours:
            ray.shutdown()
    finally:
        if folder is not None:
            folder.remove()
            _restore(_TOKENS, _connection.tokens)  # the program may join a cluster without tokens later


def _restore(variable: str, value: str | None) -> None:
    os.environ.pop(variable, None)
    if value is not None:
        os.environ[variable] = value


def _end_half_started(folder: Path) -> None:
    """Kill Ray's processes after an interrupted start, for instance by Ctrl-C; Ray does not kill them itself."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                process.kill()
                process.wait(_CONNECT_TIMEOUT_S)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_reachable(address: str) -> bool:
    """Whether the dashboard listens on more than the loopback interface.

    Ray reports the node's address for such a dashboard. If the node's address is loopback itself, the dashboard is on
    this machine, and its socket is checked.
    """
    place = urlsplit(f"//{address}")
    try:
        if not ipaddress.ip_address(place.hostname or "").is_loopback:
            return True
        sockets = psutil.net_connections("tcp")
    except (ValueError, psutil.AccessDenied):  # a host name; a system that does not show sockets
        return True
    listening = [
        socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN and socket.laddr.port == place.port
    ]
    return any(ipaddress.ip_address(ip).is_unspecified for ip in listening)


def _asks_for_token(address: str) -> bool:
    """Whether the dashboard requires a token; versions of Ray without this page have no tokens."""
    try:
        page = build_opener(ProxyHandler({})).open(
            f"http://{address}/api/authentication_mode", timeout=_CONNECT_TIMEOUT_S
        )
        with page:
            return json.load(page)["authentication_mode"] == "token"
    except (OSError, ValueError, LookupError, TypeError):
        return False


class OwnFolder:
    """The new folder of a local cluster, locked by this process.

    The lock is released when the process exits or is killed. Unlike process ids, locks work across containers. The
    constructor first removes unlocked folders, which killed programs of this user left.

    Raises:
        WorkerError: if no folder can be created, or the file system has no locks.
    """

    def __init__(self) -> None:
        for left in _PARENT.glob(f"{_PREFIX}*"):
            descriptor = _locked(left)
            if descriptor is not None:
                _remove(left, descriptor)
        self.path, self._descriptor = _new()

    def remove(self) -> None:
        _remove(self.path, self._descriptor)


def is_own_folder(path: str) -> bool:
    """Whether this process or any other made the folder with `OwnFolder`."""
    return Path(path).parent == _PARENT and Path(path).name.startswith(_PREFIX)


def _new() -> tuple[Path, int]:
    for _ in range(_MOST_ATTEMPTS):
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PARENT))
        except OSError as error:
            raise WorkerError(
                f"the folder of a local cluster cannot be created in {_PARENT} ({error}); check the disk, or start a "
                "cluster with `ray start --head` and set cluster.address=auto"
            ) from error
        descriptor = _locked(path)
        if descriptor is not None:
            return path, descriptor
        # Another program took the new folder for a leftover: it holds the lock and removes the folder.
    raise WorkerError(
        f"folders in {_PARENT} cannot be locked, which a local cluster needs; start a cluster with `ray start --head` "
        "and set cluster.address=auto"
    )


def _locked(path: Path) -> int | None:
    """Lock the folder; None if it belongs to another user, is locked, or was removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.getuid() and os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove(path: Path, descriptor: int) -> None:
    """Remove a folder that this process has locked."""
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
