"""What tests of several parts share: pools of ranks, and which tests run in the same xdist worker."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from typing import Any

# Two pytest workers on two cores: one thread each, also in the processes they start. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from lucidrl.envs.processes import PRELOAD
from tests.groups import ROOT, GroupScheduling, priority_of
from tests.ranks import RankPools

# A shell that starts the tests in the background makes them ignore Ctrl-C, and nohup makes them ignore SIGHUP.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# A fork server imports only what it knows when it starts, so it must know what the processes of all tests need.
multiprocessing.set_forkserver_preload(["lucidrl.collectors.worker", "lucidrl.envs.text.workers", *PRELOAD])


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return GroupScheduling(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: priority_of(item.path.relative_to(ROOT).as_posix()))


def pytest_collection_finish() -> None:
    gc.freeze()  # a full collection would visit the million objects of all imported modules each time


@pytest.fixture(scope="session")
def rank_pools():
    pools = RankPools(2, 4)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def two_ranks(rank_pools):
    return rank_pools[2]


@pytest.fixture(scope="session")
def four_ranks(rank_pools):
    return rank_pools[4]
