"""The order of rows: each epoch has every row once, and any position can be computed alone."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.data.order import KeyedOrder, SortedOrder, choice, shares
from lucidrl.errors import DataError

ORDERS = [KeyedOrder, SortedOrder]


def take(order, start, count):
    return [order.at(position) for position in range(start, start + count)]


@pytest.mark.parametrize("kind", ORDERS)
@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 70), seed=st.integers(0), epoch=st.integers(0, 5))
def test_every_epoch_has_every_row_once(kind, size, seed, epoch):
    assert sorted(take(kind(size, seed), epoch * size, size)) == list(range(size))


@pytest.mark.parametrize("kind", ORDERS)
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_the_order_depends_on_the_position_alone(kind, start, count):
    uninterrupted = take(kind(13, seed=1), 0, 120)
    assert take(kind(13, seed=1), start, count) == uninterrupted[start : start + count]


@pytest.mark.parametrize("kind", ORDERS)
def test_epochs_and_seeds_give_different_orders(kind):
    order = kind(50, seed=0)
    assert take(order, 0, 50) != take(order, 50, 50)
    assert take(order, 0, 50) != take(kind(50, seed=1), 0, 50)


def test_the_orders_never_change():
    assert take(SortedOrder(10, seed=0), 0, 10) == [8, 4, 2, 6, 0, 7, 5, 1, 9, 3]
    assert take(KeyedOrder(10, seed=0), 0, 10) == [9, 8, 6, 7, 5, 0, 1, 3, 2, 4]
    assert KeyedOrder(2_000_000, seed=3).at(5_000_001) == 1702784


@pytest.mark.parametrize("size", [5, 24])
def test_every_row_is_equally_likely_at_every_position(size):
    num_seeds = 600
    for position in (0, size // 2, size - 1):
        counts = Counter(KeyedOrder(size, seed).at(position) for seed in range(num_seeds))
        expected = num_seeds / size
        chi_squared = sum((counts[row] - expected) ** 2 / expected for row in range(size))
        assert chi_squared < size - 1 + 5 * (2 * (size - 1)) ** 0.5


def test_a_million_rows_need_no_memory():
    tracemalloc.start()
    order = KeyedOrder(10**9, seed=0)
    assert len({order.at(position) for position in range(1000)}) == 1000
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_an_order_of_no_rows_is_refused():
    with pytest.raises(DataError, match="an order of 0 rows"):
        KeyedOrder(0, seed=0)
    with pytest.raises(ValueError, match="position=-1"):
        KeyedOrder(3, seed=0).at(-1)


def test_datasets_are_chosen_in_proportion_to_their_weights():
    counts = Counter(choice([3.0, 1.0], 0, position) for position in range(8000))
    assert 0.73 < counts[0] / 8000 < 0.77
    assert choice([3.0, 1.0], 0, 5) == choice([3.0, 1.0], 0, 5)


@pytest.mark.parametrize(
    ("count", "weights", "expected"),
    [
        (7, [1], [7]),
        (3, [1, 1], [2, 1]),
        (10, [9, 1], [9, 1]),
        (5, [1e9, 1], [4, 1]),
        (10, [98, 1, 1], [8, 1, 1]),
        (1, [1, 1], [1, 0]),
    ],
)
def test_shares_follow_the_weights_and_sum_to_the_count(count, weights, expected):
    assert shares(count, weights) == expected
