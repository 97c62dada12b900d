"""The connection of this program to Ray: one, shared by all that use it, and ended with the last of them.

A Ray that is started for the run listens on the loopback interface only, has no dashboard and tells nobody of its use;
its files are in a folder of its own. A cluster that was there before is left as it was, and so is a connection that the
program itself has made; one that strangers could use is joined only if that was asked for.
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
"""The address that means a Ray started for the run."""
VARIABLE = "RAY_ADDRESS"
"""The address that means whatever Ray's own variable of this name says, as in a job that was submitted to a cluster."""

_REACH_DEADLINE_S = 5.0
_STATISTICS = "RAY_USAGE_STATS_ENABLED"
_TOKENS = "RAY_AUTH_MODE"
_PARENT = Path("/tmp")
"""Of the folders: the paths of Ray's sockets below them must be short, so it is not TMPDIR."""
_PREFIX = "lucid-ray-"
_MOST_ATTEMPTS = 10


@dataclass
class _Connection:
    """The connection of this program to Ray, while it has users."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    is_ours: bool = False
    own_folder: OwnFolder | None = None
    """Of a local cluster."""
    tokens: str | None = None
    """The variable about tokens before the local cluster was started, which sets it."""


_connection = _Connection()


@contextmanager
def connected(address: str | None, allow_open_dashboard: bool = False, shows_output: bool = False) -> Iterator[bool]:
    """Be connected to Ray meanwhile; whether it is one that was started for the run.

    Args:
        address: `host:port` of a cluster, `auto` for the one of this machine, `local` or None for one that is started;
            `RAY_ADDRESS` for what that variable says. A program that is connected already stays so, and starts none.
        allow_open_dashboard: join also a cluster with a dashboard that other machines reach without a token.
        shows_output: whether what actors print is shown here, if this is what makes the connection.

    Raises:
        ConfigError: if Ray is not installed, there is no cluster to be reached at the address, its dashboard is open,
            or the program is connected to another one.
        WorkerError: if the one to be started does not start.
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
    told = os.environ.get(VARIABLE)
    if address == VARIABLE or (address == "auto" and told):  # Ray itself lets the variable decide what is automatic
        setting, address = VARIABLE, told
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

    with suppress(OSError):  # Ray leaves its token there, for everybody to read who can enter
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
            )
    except Exception as error:  # Ray raises plain ones
        raise WorkerError(
            f"Ray did not start on this machine: {_first_line(error)}; see whether it is overloaded or out of memory, "
            f"or start a Ray yourself and set {setting}=auto"
        ) from error
    finally:
        _restore(_STATISTICS, statistics)
    ip = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(ip).is_loopback:
        raise ConfigError(
            f"a Ray of version {ray.__version__} that is started here listens on {ip}, not on the loopback interface "
            f"alone; start one yourself as you see fit, and set {setting}=auto"
        )


def _join(address: str, setting: str, shows_output: bool) -> None:
    import ray

    try:
        found = ray_internals.bootstrap_address(address)
        with socket.create_connection(_as_ray_takes_it(found), timeout=_REACH_DEADLINE_S):
            pass  # Ray itself tries for minutes
        ray.init(address=found, log_to_driver=shows_output, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises RuntimeError, ConnectionError, ValueError and errors of its own
        raise ConfigError(
            f"{setting}={address} leads to no Ray cluster that can be joined: {_first_line(error)}; start one with "
            f"`ray start --head`, run this on one of its nodes, or unset {setting} to have a Ray started for the run"
        ) from error


def _check_is_for_others() -> None:
    """Refuse a Ray that another run has started for itself, which Ray finds by `auto` if there is no other."""
    folder = ray_internals.temporary_folder()
    if folder is not None and is_own_folder(folder):
        raise ConfigError(
            "cluster.address=auto leads to a Ray that another run has started for itself, and that ends with it; start "
            "one with `ray start --head`, or unset cluster.address to have one started for this run too"
        )


def _check_dashboard(address: str, setting: str) -> None:
    """Refuse a dashboard that other machines reach without a token."""
    dashboard = ray_internals.dashboard_address()
    if dashboard and _is_reachable(dashboard) and not _asks_for_token(dashboard):
        raise ConfigError(
            f"{setting}={address} is a Ray cluster whose dashboard answers other machines, at {dashboard}, and "
            "asks for no token: whoever reaches it can run programs on all nodes. Start the cluster with "
            "--dashboard-host=127.0.0.1, or with RAY_AUTH_MODE=token on all nodes; in a network where everybody may do "
            "that, set cluster.allow_open_dashboard=true"
        )


def _check_is_at(address: str | None) -> None:
    """Refuse the address of another cluster than the one that the program is connected to: it can be in one only."""
    import ray

    current = ray.get_runtime_context().gcs_address
    if address in (None, LOCAL, "auto", current) or _places(address) & _places(current):
        return
    raise ConfigError(
        f"cluster.address={address} is not {current}, the Ray cluster that this program is connected to; give that "
        "address or none, or call ray.shutdown() before"
    )


def _places(address: str) -> set[tuple[str, int]]:
    """What an address leads to: a cluster has several, such as names."""
    try:
        found = socket.getaddrinfo(*_as_ray_takes_it(address), type=socket.SOCK_STREAM)
    except (OSError, OverflowError):  # no such name or port
        return set()
    return {(str(place[0]), int(place[1])) for *_, place in found}


def _as_ray_takes_it(address: str) -> tuple[str, int]:
    """Host and port: a loopback host stands for the address of this node."""
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
            _restore(_TOKENS, _connection.tokens)  # of a cluster without tokens, too, the program can be a part later


def _restore(variable: str, value: str | None) -> None:
    os.environ.pop(variable, None)
    if value is not None:
        os.environ[variable] = value


def _end_half_started(folder: Path) -> None:
    """Ray does not know of what it has started before it was interrupted in its start, as by Ctrl-C."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                process.kill()
                process.wait(_REACH_DEADLINE_S)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_reachable(address: str) -> bool:
    """Whether it listens on more than the loopback interface.

    Ray names the address of its node for a dashboard that does. That of a cluster on the loopback interface alone is
    that one in any case, and the dashboard is on this machine: its socket tells.
    """
    place = urlsplit(f"//{address}")
    try:
        if not ipaddress.ip_address(place.hostname or "").is_loopback:
            return True
        sockets = psutil.net_connections("tcp")
    except (ValueError, psutil.AccessDenied):  # a name of its own; a system that does not let us look
        return True
    listening = [
        socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN and socket.laddr.port == place.port
    ]
    return any(ipaddress.ip_address(ip).is_unspecified for ip in listening)


def _asks_for_token(address: str) -> bool:
    """It says so itself; one that says nothing is of a Ray without tokens."""
    try:
        page = build_opener(ProxyHandler({})).open(
            f"http://{address}/api/authentication_mode", timeout=_REACH_DEADLINE_S
        )
        with page:
            return json.load(page)["authentication_mode"] == "token"
    except (OSError, ValueError, LookupError, TypeError):
        return False


class OwnFolder:
    """The new folder of a local cluster, locked by this process.

    The lock ends with the process, however that ends, and holds across containers, where process ids say nothing.
    Folders that killed programs of this user have left are removed first.

    Raises:
        WorkerError: if no folder can be made, or the file system has no locks.
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
    """Whether a folder is one of these, of whichever program."""
    return Path(path).parent == _PARENT and Path(path).name.startswith(_PREFIX)


def _new() -> tuple[Path, int]:
    for _ in range(_MOST_ATTEMPTS):
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PARENT))
        except OSError as error:
            raise WorkerError(
                f"a Ray that is started for a run has its folder in {_PARENT}, where none can be made ({error}); see "
                "to the disk, or start a Ray yourself and set cluster.address=auto"
            ) from error
        descriptor = _locked(path)
        if descriptor is not None:
            return path, descriptor
        # Another program came between the two, took it for a folder that was left, and removes it.
    raise WorkerError(
        f"folders in {_PARENT} cannot be locked, as that of a Ray that is started for a run has to be; start a Ray "
        "yourself and set cluster.address=auto"
    )


def _locked(path: Path) -> int | None:
    """Lock the folder; None if it is somebody else's, locked, or gone."""
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
    """Remove a folder that this process holds, and let it go."""
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
