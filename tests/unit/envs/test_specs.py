import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.envs.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)
from lucidrl.errors import ConfigError, DataError

INF = float("inf")
SPECS = [
    Unbounded(),
    Unbounded((3, 2), torch.float64),
    Unbounded((4,), torch.int64),
    Unbounded((4,), torch.bool),
    Bounded(-2, 2, (3,)),
    Bounded([-1.0, -INF, 0.0, -INF], [1.0, INF, INF, 0.0]),
    Bounded(-1e308, 1e308, (5,), torch.float64),
    Bounded(0, 255, (4, 4, 3), torch.uint8),
    Bounded([-3, 0], [0, 9], dtype=torch.int64),
    Categorical(5),
    Categorical(2, (1,), torch.bool),
    OneHot(4),
    OneHot(3, (2, 3), torch.bool),
    MultiCategorical([2, 3, 4]),
    MultiCategorical([[2, 3], [4, 5]], (6, 2, 2)),
    MultiOneHot([2, 3]),
    MultiOneHot([1, 3], (5, 4), torch.float32),
    Binary(6),
    Binary(shape=(2, 3), dtype=torch.bool),
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=repr)


@each_spec
def test_random_values_are_in_their_spec_with_its_shape_and_dtype(spec):
    for _ in range(50):
        value = spec.rand()
        assert (value.shape, value.dtype) == (spec.shape, spec.dtype)
        assert spec.is_in(value)


@each_spec
def test_values_of_another_shape_or_dtype_are_not_in_a_spec(spec):
    assert not spec.is_in(spec.rand().unsqueeze(0))
    assert not spec.is_in(spec.rand().to(torch.complex64))


@each_spec
def test_torchs_seed_decides_random_values(spec):
    torch.manual_seed(3)
    first = spec.rand()
    torch.manual_seed(3)
    assert torch.equal(spec.rand(), first)


@each_spec
def test_a_spec_equals_its_pickled_copy_and_no_other_spec(spec):
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert [other for other in SPECS if other == spec] == [spec]
    assert spec.to("meta") != spec


@each_spec
def test_an_expanded_spec_holds_rows_of_the_present_one(spec):
    wide = spec.expand(7, *spec.shape)
    assert wide == spec.expand((7, *spec.shape))
    value = wide.rand()
    assert value.shape == (7, *spec.shape)
    assert wide.is_in(value)
    assert all(spec.is_in(row) for row in value)
    assert wide.zero().shape == value.shape
    with pytest.raises(ConfigError, match="the new shape must end with"):
        wide.expand(8, *spec.shape)


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (Unbounded((2,)), [0.0, float("nan")]),
        (Bounded(-1, 1, (2,)), [0.0, 1.5]),
        (Bounded(-1, 1, (2,)), [float("nan"), 0.0]),
        (Bounded(-INF, 0, (1,)), [1e-3]),
        (Categorical(3), 3),
        (Categorical(3), -1),
        (OneHot(3), [0, 0, 0]),
        (OneHot(3), [1, 1, 0]),
        (OneHot(3), [0, 2, 0]),
        (OneHot(3), [2, -1, 0]),
        (MultiCategorical([2, 3]), [2, 0]),
        (MultiOneHot([2, 2]), [1, 1, 0, 0]),
        (MultiOneHot([2, 2]), [1, 0, 0, 0]),
        (Binary(2), [0, 2]),
    ],
    ids=repr,
)
def test_forbidden_values_are_not_in_a_spec(spec, value):
    assert not spec.is_in(torch.tensor(value, dtype=spec.dtype))


@pytest.mark.parametrize(
    ("spec", "value", "encoded"),
    [
        (OneHot(4), 2, [0, 0, 1, 0]),
        (OneHot(2, (3, 2)), [0, 1, 1], [[1, 0], [0, 1], [0, 1]]),
        (OneHot(2, (3, 2)), torch.tensor([0, 1, 1]), [[1, 0], [0, 1], [0, 1]]),
        (MultiOneHot([2, 3]), [1, 2], [0, 1, 0, 0, 1]),
        (MultiOneHot([2, 3], (2, 5)), [[0, 0], [1, 2]], [[1, 0, 1, 0, 0], [0, 1, 0, 0, 1]]),
        (Categorical(4), np.int32(3), 3),
        (Categorical(4, (2,)), [3, 1], [3, 1]),
        (MultiCategorical([2, 3]), (1, 2), [1, 2]),
        (Bounded(-1, 1, (2,)), 0.5, [0.5, 0.5]),
        (Binary(3), [True, False, True], [1, 0, 1]),
    ],
    ids=repr,
)
def test_values_are_encoded_as_a_person_writes_them(spec, value, encoded):
    result = spec.encode(value)
    assert spec.is_in(result)
    assert torch.equal(result, torch.tensor(encoded, dtype=spec.dtype))


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (OneHot(4), 4),
        (OneHot(4), -1),
        (OneHot(4), 0.5),
        (OneHot(4), [1, 2]),
        (MultiOneHot([2, 3]), [2, 0]),
        (Categorical(4), 4),
        (Categorical(4), "left"),
        (Bounded(-1, 1, (2,)), [0.0, 2.0]),
        (Unbounded((2,)), [1.0, 2.0, 3.0]),
        (Unbounded((2,)), {"a": 1}),
    ],
    ids=repr,
)
def test_an_invalid_value_is_not_encoded_and_named_with_the_spec(spec, value):
    with pytest.raises(DataError) as refusal:
        spec.encode(value)
    assert repr(value) in str(refusal.value)
    assert repr(spec) in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Bounded(1, 0), "low <= high"),
        (lambda: Bounded(float("nan"), 0), "low <= high"),
        (lambda: Bounded([0, 0], [1, 1], (3,)), "could not be broadcast"),
        (lambda: Bounded([0, 0], [1, 1, 1]), "cannot be broadcast"),
        (lambda: Bounded(-1, 5, (3,), torch.uint8), "cannot be written as uint8"),
        (lambda: Bounded(0, INF, (3,), torch.int64), "cannot be written as int64"),
        (lambda: Unbounded((3,), torch.bfloat16), "bfloat16; choose another dtype"),
        (lambda: Categorical(0), "at least 1"),
        (lambda: Categorical(257, dtype=torch.uint8), "more values than its dtype can represent"),
        (lambda: MultiCategorical([2, 3], dtype=torch.bool), "more values than its dtype can represent"),
        (lambda: OneHot(3, (4,)), "must end in 3"),
        (lambda: MultiCategorical([2, 3], (3,)), "must end in the shape of nvec"),
        (lambda: MultiCategorical([2, 0]), "each at least 1"),
        (lambda: MultiOneHot([[2, 3]]), "flat list"),
        (lambda: Binary(), "give n or shape"),
        (lambda: Binary(2, (3,)), "must end in n=2"),
        (lambda: Composite(a=3), "'a' is a int"),
        (lambda: Composite(a=Unbounded((3,)), shape=(2,)), r"expand it to the Composite\'s shape=\[2\]"),
    ],
)
def test_invalid_specs_are_refused(make, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make()


@settings(max_examples=50, deadline=None)
@given(nvec=st.lists(st.integers(1, 6), min_size=1, max_size=4), rows=st.integers(1, 5), data=st.data())
def test_every_choice_has_its_own_vector(nvec, rows, data):
    indices = [[data.draw(st.integers(0, n - 1)) for n in nvec] for _ in range(rows)]
    encoded = MultiOneHot(nvec, (rows, sum(nvec))).encode(indices)
    blocks = encoded.split(nvec, dim=-1)
    assert torch.stack([block.argmax(-1) for block in blocks], -1).tolist() == indices
    assert encoded.sum().item() == rows * len(nvec)


def test_random_choices_reach_all_of_them_and_nothing_else():
    rng = np.random.default_rng(0)
    drawn = np.stack([OneHot(3).sample(rng) for _ in range(200)])
    assert (drawn.sum(0) > 40).all()
    assert set(np.stack([Bounded(1, 3, (), torch.int64).sample(rng) for _ in range(100)]).tolist()) == {1, 2, 3}


def test_limits_have_the_shape_of_the_spec():
    spec = Bounded(-1, [1.0, 2.0], (3, 2))
    assert spec.low.tolist() == [[-1, -1]] * 3
    assert spec.high.tolist() == [[1, 2]] * 3
    assert Bounded(-1, 1, (2,)) == Bounded([-1, -1], [1, 1])


@pytest.fixture
def composite():
    return Composite({"place": Unbounded((3,)), "hand": {"grip": Binary(2), "arm": {"angle": Bounded(-1, 1, (1,))}}})


def test_a_composite_lists_its_leaves_by_path(composite):
    assert list(composite.leaves()) == ["place", ("hand", "grip"), ("hand", "arm", "angle")]
    assert list(composite) == ["place", "hand"]
    assert ("hand", "arm", "angle") in composite
    assert ("hand", "leg") not in composite
    assert ("place", "x") not in composite


def test_a_composite_makes_tensordicts_of_its_shape(composite):
    wide = composite.expand(4)
    for spec, batch_size in ((composite, ()), (wide, (4,))):
        drawn = spec.rand()
        assert drawn.batch_size == batch_size
        assert spec.is_in(drawn)
        assert set(drawn.keys(True, True)) == set(spec.leaves())
        assert (spec.zero() == 0).all()
    assert not composite.is_in(wide.rand())
    assert not composite.is_in(composite.rand().exclude(("hand", "grip")))
    assert not composite.is_in(composite.rand().set(("hand", "arm", "angle"), torch.full((1,), 2.0)))
    assert composite.is_in(composite.rand().set("further", torch.zeros(1)))


def test_a_composite_is_changed_by_path_and_its_clone_with_it_is_not(composite):
    clone = composite.clone()
    assert clone == composite
    clone["hand", "arm", "length"] = Unbounded((1,))
    clone["leg", "angle"] = Unbounded((1,))
    del clone["hand", "grip"]
    assert list(clone.leaves()) == ["place", ("hand", "arm", "angle"), ("hand", "arm", "length"), ("leg", "angle")]
    assert ("hand", "grip") in composite
    assert clone != composite
    with pytest.raises(ConfigError, match="is below 'place'"):
        clone["place", "x"] = Unbounded()
    with pytest.raises(KeyError, match="the specs are 'place'"):
        clone["foot"]


def test_a_nested_composite_keeps_its_further_dims_when_expanded():
    spec = Composite({"agents": Composite(view=Unbounded((2, 5)), shape=(2,))}).expand(7)
    assert (spec["agents"].shape, spec["agents", "view"].shape) == ((7, 2), (7, 2, 5))
    assert spec.rand()["agents"].batch_size == (7, 2)
