"""Tensors and nested states survive a round trip through safetensors and JSON."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.checkpoint.tensors import flatten_state, load_tensors, read_metadata, save_tensors, unflatten_state
from lucidrl.errors import CheckpointError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path, dtype):
    tensor = torch.tensor([0, 1, 1, 0, 1, 3]).to(dtype).reshape(2, 3)
    save_tensors(tmp_path / "x.safetensors", {"x": tensor})
    loaded = load_tensors(tmp_path / "x.safetensors")["x"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    weight = torch.randn(1000)
    save_tensors(tmp_path / "x.safetensors", {"embed": weight, "head": weight})
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert loaded["embed"] is loaded["head"]
    assert torch.equal(loaded["head"], weight)
    assert (tmp_path / "x.safetensors").stat().st_size < 5000


def test_overlapping_and_transposed_views_are_stored_in_full(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    views = {"base": base, "row": base[1], "t": base.T, "column": base[:, 2]}
    save_tensors(tmp_path / "x.safetensors", views)
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert loaded.keys() == views.keys()
    assert all(torch.equal(loaded[name], view) for name, view in views.items())


def test_conjugated_and_negated_views_keep_their_values(tmp_path):
    complex_view = torch.complex(torch.ones(3), torch.arange(3.0)).conj()
    save_tensors(tmp_path / "x.safetensors", {"conj": complex_view, "neg": complex_view.imag})
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert torch.equal(loaded["conj"], complex_view)
    assert torch.equal(loaded["neg"], complex_view.imag)


def test_scalar_empty_and_gradient_tensors_are_kept(tmp_path):
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "grad": torch.ones(2, requires_grad=True)}
    save_tensors(tmp_path / "x.safetensors", tensors)
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert loaded["scalar"].shape == ()
    assert loaded["empty"].shape == (0, 4)
    assert torch.equal(loaded["grad"], torch.ones(2))


def test_changing_a_loaded_tensor_leaves_the_file_alone(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(4)})
    load_tensors(tmp_path / "x.safetensors")["x"].fill_(1)
    assert torch.equal(load_tensors(tmp_path / "x.safetensors")["x"], torch.zeros(4))


def test_metadata_can_be_read_without_the_tensors(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(1)}, {"weight_version": "7"})
    assert read_metadata(tmp_path / "x.safetensors")["weight_version"] == "7"


def test_the_file_is_as_readable_as_any_other(tmp_path):
    (tmp_path / "plain").touch()
    save_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(1)})
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_a_tensor_the_format_cannot_hold_is_named(tmp_path, tensor):
    with pytest.raises(CheckpointError, match="momentum"):
        save_tensors(tmp_path / "x.safetensors", {"momentum": tensor})


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04 a pickle is not welcome here")
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        load_tensors(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        load_tensors(tmp_path / "gone.safetensors")


def test_an_optimizer_continues_bit_exactly_from_its_saved_state(tmp_path):
    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)

    tensors, structure = flatten_state(optimizer.state_dict())
    save_tensors(tmp_path / "optimizer.safetensors", tensors)
    resumed = torch.nn.Linear(4, 2)
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=1.0)
    text = json.dumps(structure, allow_nan=False)
    loaded = unflatten_state(load_tensors(tmp_path / "optimizer.safetensors"), json.loads(text))
    assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]
    resumed_optimizer.load_state_dict(loaded)

    step(model, optimizer)
    step(resumed, resumed_optimizer)
    assert torch.equal(model.weight, resumed.weight)
    assert torch.equal(model.bias, resumed.bias)


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
