"""Rows whose common tokens are computed once have the results and gradients of rows that are computed alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lucidrl.distributed import prefix_tree
from lucidrl.losses.interfaces import TokenOutputs
from lucidrl.models import attention
from lucidrl.models.loading import load_model
from lucidrl.models.logprobs import LogprobModel
from tests.float64 import float64_throughout
from tests.tiers import slow_except

NEEDS = frozenset({"logprobs", "entropy", "logits"})
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64_throughout():
        yield


@pytest.fixture
def share_everything(monkeypatch):
    monkeypatch.setattr(prefix_tree, "MIN_SAVED_TOKENS", 1)


def tree_rows(seed: int = 0) -> list[list[int]]:
    """Two groups, one with a second level of branches, with equal and empty completions, and a row without a group."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(2, 60, (length,), generator=draw).tolist()

    first, second, turn = tokens(9), tokens(7), tokens(6)
    return [
        [*first, *tokens(4)],
        [*first, *turn, *tokens(3)],
        [*second, *tokens(5)],
        [*first, *turn, *tokens(8)],
        [*first],
        [*second, *tokens(2)],
        [*second, *tokens(2)],
        tokens(11),
        [*first, *turn, *tokens(8)],
    ]


def outputs_and_gradients(
    model: LogprobModel, rows: list[list[int]], shared: bool
) -> tuple[TokenOutputs, dict[str, torch.Tensor], int]:
    """The outputs, the gradients of a random weighted sum of all of them, and the number of computed tokens."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [1] * (int(lengths.max()) - len(row)) for row in rows])
    before = model.num_computed_tokens
    model.zero_grad()
    outputs = model(ids, lengths, NEEDS, packed=True, shared=shared)
    within = torch.arange(ids.shape[1]) < lengths[:, None]
    draw = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for values in (outputs.logprobs, outputs.entropy, outputs.logits[within]):
        total = total + (values * torch.randn(values.shape, generator=draw, dtype=torch.float64)).sum()
    if total.requires_grad:
        total.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return outputs, gradients, model.num_computed_tokens - before


def assert_sharing_changes_nothing(model: LogprobModel, rows: list[list[int]]) -> int:
    """Return how many tokens sharing saves."""
    alone, expected, num_alone = outputs_and_gradients(model, rows, shared=False)
    shared, found, num_shared = outputs_and_gradients(model, rows, shared=True)
    for name in NEEDS:
        torch.testing.assert_close(getattr(shared, name), getattr(alone, name), **TOLERANCE, msg=name)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **TOLERANCE, msg=name)
    return num_alone - num_shared


@pytest.mark.parametrize("queries_per_call", slow_except([512, 3], 3))
def test_outputs_and_gradients_of_every_architecture(every_model, share_everything, monkeypatch, queries_per_call):
    monkeypatch.setattr(attention, "QUERIES_PER_CALL", queries_per_call)
    model = LogprobModel(load_model(every_model, torch.float64), 0.7)
    saved = assert_sharing_changes_nothing(model, tree_rows())
    assert saved == 9 * 4 + 6 * 2 + 7 * 2 + 8 * 0  # the longest equal prefixes of the rows


def test_only_selected_tokens_are_scored(tiny_model, share_everything):
    model = LogprobModel(load_model(tiny_model("llama"), torch.float64), 1.0)
    rows = tree_rows()
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([row + [1] * (int(lengths.max()) - len(row)) for row in rows])
    # Of two rows with a common token, one selects it.
    selected = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    with torch.no_grad():
        alone = model(ids, lengths, selected=selected)
        shared = model(ids, lengths, selected=selected, shared=True)
        torch.testing.assert_close(shared.logprobs, alone.logprobs, **TOLERANCE)
        assert not model(ids, lengths, selected=selected & False, shared=True).logprobs.any()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_trees(tiny_model, share_everything, data):
    """Trees up to depth 5, with empty completions, equal samples and single samples."""
    rows: list[list[int]] = [data.draw(st.lists(st.integers(2, 60), min_size=1, max_size=9))]
    for _ in range(data.draw(st.integers(0, 5), label="depth")):
        parents = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=3))
        rows += [row + data.draw(st.lists(st.integers(2, 60), max_size=7)) for row in parents]
    rows = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=8))
    model = LogprobModel(load_model(tiny_model("mistral_sliding"), torch.float64), 1.0)
    saved = assert_sharing_changes_nothing(model, rows)
    assert saved == sum(map(len, rows)) - len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
