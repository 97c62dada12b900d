"""What a run on a local cluster exposes and records: several checks of one run."""

from __future__ import annotations

import ipaddress
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from ray._private.state import state as ray_state

from lucidrl.distributed.workers import ray_cluster
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.folder import driver_log
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from lucidrl.utils.logger.monitor import LocalMonitorLogger
from tests.unit.recipes.test_two_workers import SMALL, Unwatched

pytestmark = pytest.mark.slow

SETTINGS = [
    "cluster.launcher=ray",
    "cluster.num_workers=2",
    "cluster.num_threads=1",
    "num_threads=1",
    "policy.generation.placement=separate",
    "policy.generation.refit=collective",
]
SECRET_NAMES = ("WANDB_API_KEY", "HF_TOKEN", "LUCIDRL_LLM_JUDGE_PASSWORD")


@dataclass
class Seen:
    """Of a run that has ended, while its Ray still runs."""

    folder: Path
    session: Path
    """Of Ray."""
    secrets: list[bytes]
    listening: set[tuple[str, bool]]
    """Addresses, and whether it was a rank that listened there."""
    tables: list[bytes]
    """What Ray knows of jobs, actors and workers, with their runtime environments."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("run")
    values = [secrets.token_hex(16) for _ in SECRET_NAMES]
    listening: set[tuple[str, bool]] = set()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in zip(SECRET_NAMES, values, strict=True):
            patched.setenv(name, value)
        patched.setattr(LocalMonitorLogger, "start", lambda self: pytest.fail("Ray's nodes are not monitored"))
        others = set(psutil.Process().children(recursive=True))  # such as the cluster of other tests
        before = listening_at(psutil.Process())
        with ray_cluster.connected(None):
            with listened_to(listening, others, before), driver_log(folder):
                train(load_config(GRPORunConfig, SMALL, overrides=SETTINGS), folder, Unwatched())
            session = ray_cluster._connection.own_folder.path
            yield Seen(folder, session, [value.encode() for value in values], listening, tables_of_ray())


def listening_at(process: psutil.Process) -> set[tuple[str, int]]:
    return {tuple(one.laddr) for one in process.net_connections() if one.status == psutil.CONN_LISTEN}


@contextmanager
def listened_to(
    found: set[tuple[str, bool]], others: set[psutil.Process], before: set[tuple[str, int]]
) -> Iterator[None]:
    """Record where this process and those below it listen.

    Args:
        others: processes that were there before; they are left out, and so are those that they start.
        before: addresses at which this process listened before.
    """
    done = threading.Event()

    def look() -> None:
        nonlocal found
        while not done.wait(0.3):
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                with suppress(psutil.Error):  # exited
                    if process in others or others.intersection(process.parents()):
                        continue
                    is_rank = "spawn_main" in " ".join(process.cmdline())
                    found |= {(ip, is_rank) for ip, _ in listening_at(process) - before}

    thread = threading.Thread(target=look)
    thread.start()
    yield
    done.set()
    thread.join()


def tables_of_ray() -> list[bytes]:
    accessor = ray_state._connect_and_get_accessor()
    return [*accessor.get_job_table(), *accessor.get_actor_table(None, None), *accessor.get_worker_table()]


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def test_nothing_listens_beyond_the_loopback_interface(seen):
    assert {is_rank for _, is_rank in seen.listening} == {True, False}
    assert all(is_loopback(address) for address, _ in seen.listening), seen.listening


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def test_secrets_are_in_no_file_and_no_table_of_ray(seen):
    files = files_of(seen.session)
    assert any("gcs_server" in path.name for path in files)
    assert len(seen.tables) > 3
    assert any(b"NodeAgent" in table for table in seen.tables)
    for secret in seen.secrets:
        assert not [path for path in files if secret in path.read_bytes()]
        assert not [table for table in seen.tables if secret in table]


def test_secrets_are_in_no_file_of_the_run(seen):
    files = files_of(seen.folder)
    assert {"driver.log", "rank_0.log", "hyperparams.json", "metrics.jsonl"} <= {path.name for path in files}
    for secret in seen.secrets:
        assert not [path for path in files if secret in path.read_bytes()]


def test_the_use_of_ray_nodes_is_recorded_by_default(seen):
    """Or why not is said, once."""
    metrics = (seen.folder / "metrics.jsonl").read_text()
    said = (seen.folder / "logs" / "driver.log").read_text().count("node 0 at ")
    assert '"ray/node.0.mem_total_gb"' in metrics or said == 1
    assert said <= 1
