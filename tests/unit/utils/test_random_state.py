"""The global random generators continue from a restored state."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lucidrl.errors import CheckpointError
from lucidrl.utils.random_state import random_state, seed_everything, set_random_state

GENERATORS = {
    "python": lambda: [random.random(), random.gauss(0, 1)],
    "numpy": lambda: np.random.standard_normal(3).tolist(),
    "torch": lambda: torch.randn(3).tolist(),
}


def draws() -> dict[str, list[float]]:
    return {name: draw() for name, draw in GENERATORS.items()}


@given(seed=st.integers(0, 2**63 - 1), counts=st.tuples(*[st.integers(0, 7)] * 3))
def test_a_state_that_went_through_json_gives_the_same_draws(seed, counts):
    seed_everything(seed)
    for draw, count in zip(GENERATORS.values(), counts, strict=True):
        for _ in range(count):
            draw()
    state = json.loads(json.dumps(random_state()))
    expected = [draws() for _ in range(3)]
    seed_everything(seed + 1)
    set_random_state(state)
    assert [draws() for _ in range(3)] == expected


def test_one_seed_gives_the_same_draws_and_another_seed_or_stream_gives_others():
    found = {}
    for name, arguments in {"first": (3,), "again": (3,), "other seed": (4,), "other stream": (3, 1)}.items():
        seed_everything(*arguments)
        found[name] = draws()
    assert found["first"] == found["again"]
    for other in ("other seed", "other stream"):
        assert all(found[other][name] != found["first"][name] for name in GENERATORS)


def test_a_damaged_state_is_refused_and_changes_nothing():
    state = random_state()
    of_python, of_numpy = state["python"], state["numpy"]
    damaged = [
        *({name: value for name, value in state.items() if name != missing} for missing in GENERATORS),
        *({**state, name: None} for name in GENERATORS),
        *({**state, "torch": words} for words in ("!", "AAAA", "", 7)),
        *({**state, "python": {**of_python, "words": words}} for words in ("!", "AAAAAAAA")),
        *({**state, "numpy": {**of_numpy, "words": words}} for words in ("!", "AAAAAAAA")),
        {**state, "python": {**of_python, "version": 99}},
        {**state, "python": {**of_python, "next_gauss": "much"}},
        {**state, "numpy": {**of_numpy, "next_gauss": "much"}},
        *({**state, "numpy": {**of_numpy, "position": position}} for position in (-1, 625, 10**6, "1", None)),
    ]
    for wrong in damaged:
        with pytest.raises(CheckpointError, match="the saved random state cannot be restored"):
            set_random_state(wrong)
        assert random_state() == state
