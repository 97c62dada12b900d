"""What tests of several parts share."""

from __future__ import annotations

import signal

import pytest

from tests.ranks import Ranks

# Who starts the tests in the background may have them ignore Ctrl-C, and then so would every program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()
