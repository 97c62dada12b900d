"""A worker joins the other ranks by its environment variables."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from lucidrl.distributed.process_group import (
    RankInfo,
    check_exchanges_cpu_tensors,
    init_process_group_from_environment,
    leave_process_group,
)
from lucidrl.errors import ConfigError

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_alone_there_is_no_group():
    info = init_process_group_from_environment(10)
    assert info == RankInfo(rank=0, local_rank=0, world_size=1)
    assert not dist.is_initialized()
    leave_process_group(info)


@pytest.fixture
def make_group(tmp_path):
    """Makes a default group of this process alone, as a user would."""

    def make(backend: str = "gloo") -> None:
        dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_of_another_owner_is_not_destroyed(make_group):
    make_group()
    leave_process_group(init_process_group_from_environment(10))
    assert dist.is_initialized()


def test_a_group_is_destroyed_by_its_owner(monkeypatch, make_group):
    for name, value in zip(VARIABLES, ("0", "0", "1", "localhost", "0"), strict=True):
        monkeypatch.setenv(name, value)
    first, second = (init_process_group_from_environment(10) for _ in range(2))
    leave_process_group(second)
    assert dist.is_initialized()
    leave_process_group(first)
    assert not dist.is_initialized()
    make_group()
    leave_process_group(first)  # a second time, when there is another
    assert dist.is_initialized()


def test_a_group_for_gpus_alone_is_refused_where_cpu_tensors_travel(make_group):
    make_group("cuda:gloo")
    with pytest.raises(ConfigError, match=r"offloading exchanges .* has only the backend cuda:gloo; create the"):
        check_exchanges_cpu_tensors("offloading")


def test_a_group_for_all_tensors_will_do(make_group):
    make_group()
    check_exchanges_cpu_tensors("offloading")


def test_an_incomplete_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"RANK=1 is set without LOCAL_RANK and MASTER_ADDR and MASTER_PORT;.*torch"):
        init_process_group_from_environment(10)


@pytest.mark.slow
def test_an_existing_group_is_used(two_ranks):
    def join():
        return init_process_group_from_environment(10)

    assert two_ranks(join) == [RankInfo(0, 0, 2), RankInfo(1, 1, 2)]


@pytest.mark.slow
def test_under_torchrun_a_worker_needs_no_worker_group(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.unit.distributed.toy_workers import Joined\n"
        "worker = Joined()\n"
        "open(f'{sys.argv[1]}/{worker.info.rank}', 'w').write(str(worker.sum_of_ranks()))\n"
        "worker.shutdown()\n"
        "worker.shutdown()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, str(tmp_path)], timeout=300, capture_output=True, text=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir() if path != script}
    assert written == {"0": "1.0", "1": "1.0"}, done.stderr
