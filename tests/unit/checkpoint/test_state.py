"""Nested states survive the split into tensors and strict JSON."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.checkpoint.tensors import flatten_state, unflatten_state
from lucidrl.errors import CheckpointError


def test_keys_that_look_alike_keep_their_tensors_apart():
    state = {0: torch.tensor(1), "0": torch.tensor(2), "a": {"b": torch.tensor(3)}, "a/b": torch.tensor(4)}
    tensors, structure = flatten_state(state)
    restored = unflatten_state(tensors, json.loads(json.dumps(structure)))
    assert [restored[0], restored["0"], restored["a"]["b"], restored["a/b"]] == [1, 2, 3, 4]


def test_an_object_in_a_state_is_refused_by_path_and_type():
    with pytest.raises(CheckpointError, match="groups/0/fn is a function"):
        flatten_state({"groups": [{"fn": flatten_state}]})


def test_a_structure_without_its_tensor_is_refused():
    with pytest.raises(CheckpointError, match="exp_avg"):
        unflatten_state({}, {"$tensor": "exp_avg"})


KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none())
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
STATES = st.recursive(
    LEAVES | st.sampled_from(["$tensor", "$dict"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS | st.sampled_from(["$tensor", "$float", "$tuple", "$dict"]), inner, max_size=3),
    ),
    max_leaves=10,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(STATES)
def test_any_plain_state_survives_strict_json(state):
    tensors, structure = flatten_state(state)
    restored = unflatten_state(tensors, json.loads(json.dumps(structure, allow_nan=False)))
    assert repr(restored) == repr(state)  # repr tells 0 from False, tuples from lists, and treats NaN as equal


def test_non_finite_floats_survive():
    _, structure = flatten_state({"a": math.nan, "b": [math.inf, -math.inf]})
    restored = unflatten_state({}, json.loads(json.dumps(structure, allow_nan=False)))
    assert math.isnan(restored["a"])
    assert restored["b"] == [math.inf, -math.inf]
