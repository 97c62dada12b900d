"""Histograms count every finite value in its bin, for any values."""

import sys
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucidrl.utils.logger.values import finite_histogram

MAX, TINY = sys.float_info.max, 5e-324
NAN, INF = float("nan"), float("inf")


def test_counts_stand_in_the_bins_of_their_values():
    counts, edges = finite_histogram([0.0, 0.5, 1.0, 1.5, 1.5, 63.0, 64.0, NAN, INF])
    assert edges.tolist() == list(range(65))
    assert {index: count for index, count in enumerate(counts) if count} == {0: 2, 1: 3, 63: 2}


def test_equal_values_stand_in_the_middle():
    counts, edges = finite_histogram([3.0, 3.0])
    assert (edges[0], edges[-1]) == (2.5, 3.5)
    assert counts[32] == counts.sum() == 2


@pytest.mark.parametrize("values", [[], [NAN], [INF, -INF]])
def test_without_finite_values_there_is_none(values):
    assert finite_histogram(values) is None


@given(st.lists(st.floats() | st.sampled_from([MAX, -MAX, TINY, -TINY, 0.0, 1e200, 1.0]) | st.booleans(), min_size=1))
@pytest.mark.parametrize("first", [1.7e308, -MAX, MAX, TINY, 1e200, 1e20, True])
def test_no_finite_value_is_lost_and_nothing_overflows(first, values):
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise", divide="raise"):
        warnings.simplefilter("error")
        counts, edges = finite_histogram([first, *values])
    assert counts.sum() == 1 + np.isfinite(np.asarray(values, dtype=float)).sum()
    assert np.isfinite(edges).all()
    assert edges[0] < edges[-1]


@pytest.mark.parametrize("values", [[MAX, 8.19010297e307], [MAX, -TINY], [-MAX, TINY]])
def test_edges_near_the_largest_float_neither_overflow_nor_lose_a_value(values):
    with np.errstate(over="raise"):
        counts, edges = finite_histogram(values)
    assert counts.sum() == len(values)
    assert (edges[0], edges[-1]) == (min(values), max(values))


def test_values_that_are_further_apart_than_any_float_fill_the_outer_bins():
    counts, edges = finite_histogram([-1.7e308, 1.7e308, 1.7e308, 0.0])
    assert (counts[0], counts[32], counts[63]) == (1, 1, 2)
    assert (edges[0], edges[32], edges[64]) == (-1.7e308, 0.0, 1.7e308)
