"""The reference weights are swapped in, and the policy's weights are always restored."""

from __future__ import annotations

import sys
from itertools import combinations, count

import pytest
import torch

from lucidrl.errors import ConfigError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.policy import scoring
from lucidrl.models.policy.scoring import ReferencePolicy

SGD = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}}


@pytest.fixture
def trained_worker(make_worker, make_rows):
    worker = make_worker(**SGD)
    worker.train(make_rows(), NLLLoss())
    return worker


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_reference_logprobs_are_those_of_a_freshly_loaded_model(trained_worker, make_worker, make_rows):
    rows = make_rows(seed=1)
    fresh = make_worker(init_optimizer=False).get_logprobs(rows)["logprobs"]
    found = trained_worker.get_reference_policy_logprobs(rows)["reference_logprobs"]
    assert torch.equal(found, fresh)
    assert (trained_worker.get_logprobs(rows)["logprobs"] - fresh).abs().max() > 0.01


def test_the_reference_is_the_model_as_loaded_not_the_checkpoint(trained_worker, make_worker, make_rows, tmp_path):
    trained_worker.save_checkpoint(str(tmp_path))
    resumed = make_worker(weights_path=str(tmp_path))
    rows = make_rows(seed=1)
    found = resumed.get_reference_policy_logprobs(rows)["reference_logprobs"]
    assert torch.equal(found, make_worker().get_logprobs(rows)["logprobs"])
    assert torch.equal(resumed.get_logprobs(rows)["logprobs"], trained_worker.get_logprobs(rows)["logprobs"])


def test_own_weights_are_restored(trained_worker, weights_of):
    own = weights_of(trained_worker)
    for _ in range(2):
        with trained_worker.use_reference_model():
            assert not same(weights_of(trained_worker), own)
        assert same(weights_of(trained_worker), own)


def test_own_weights_are_restored_after_an_exception(trained_worker, weights_of):
    own = weights_of(trained_worker)
    with pytest.raises(RuntimeError, match="inside"), trained_worker.use_reference_model():
        raise RuntimeError("inside")
    assert same(weights_of(trained_worker), own)


def test_inside_another_swap_nothing_changes(trained_worker, weights_of):
    own = weights_of(trained_worker)
    with trained_worker.use_reference_model():
        started_with = weights_of(trained_worker)
        with trained_worker.use_reference_model():
            assert same(weights_of(trained_worker), started_with)
        assert same(weights_of(trained_worker), started_with)
    assert same(weights_of(trained_worker), own)


class Swap:
    """Weights in several pieces, of two dtypes, changed since the reference copy."""

    def __init__(self) -> None:
        self.weights = [torch.arange(10.0).view(5, 2), torch.arange(3.0), torch.arange(5.0, dtype=torch.float64)]
        self.started_with = [tensor.clone() for tensor in self.weights]
        self.policy = ReferencePolicy(self.weights)
        self.own = [tensor.add_(100).clone() for tensor in self.weights]

    def assert_whole(self) -> None:
        """The policy has its own weights, and the reference those it started with."""
        assert all(map(torch.equal, self.weights, self.own))
        with self.policy.swapped_in():
            assert all(map(torch.equal, self.weights, self.started_with))
        assert all(map(torch.equal, self.weights, self.own))


@pytest.fixture
def _small_pieces(monkeypatch):
    monkeypatch.setattr(scoring, "_BUFFER_ELEMENTS", 4)


def run_interrupted(swap: Swap, line: int) -> int:
    """Swap in and out with a KeyboardInterrupt before the given line; return the number of executed lines."""
    num_run = 0

    def trace(frame, event, arg):
        nonlocal num_run
        if frame.f_code.co_filename != scoring.__file__:
            return None
        if event == "line":
            num_run += 1
            if num_run == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with swap.policy.swapped_in():
            pass
    except KeyboardInterrupt:
        assert num_run == line
    finally:
        sys.settrace(None)
    return num_run


@pytest.mark.usefixtures("_small_pieces")
def test_an_interrupt_at_any_line_keeps_the_policys_weights():
    num_lines = run_interrupted(Swap(), 0)
    assert num_lines > 100
    for line in range(1, num_lines + 1):
        swap = Swap()
        assert run_interrupted(swap, line) == line
        swap.assert_whole()


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_second_interrupt_while_restoring_keeps_them_too(monkeypatch, is_done):
    copy, num_copies = torch.Tensor.copy_, len(Swap().policy._copies)
    for first, second in combinations(range(num_copies), 2):
        swap, numbers = Swap(), count()

        def interrupted(target, source, first=first, second=second, numbers=numbers):
            is_interrupted = next(numbers) in (first, second)
            if is_done or not is_interrupted:
                copy(target, source)
            if is_interrupted:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", interrupted)
            with pytest.raises(KeyboardInterrupt), swap.policy.swapped_in():
                pass
        swap.assert_whole()


@pytest.mark.usefixtures("_small_pieces")
def test_repeated_copy_errors_lose_no_weights(monkeypatch):
    for num_good in range(len(Swap().policy._copies)):
        swap, copy, numbers = Swap(), torch.Tensor.copy_, count()

        def failing(target, source, copy=copy, numbers=numbers, num_good=num_good):
            if next(numbers) >= num_good:
                raise RuntimeError("the device is lost")
            copy(target, source)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", failing)
            with pytest.raises(RuntimeError, match="the device is lost"), swap.policy.swapped_in():
                pass
        swap.policy._restore()
        swap.assert_whole()


def test_training_continues_after_the_swap(trained_worker, make_worker, make_rows, weights_of):
    undisturbed = make_worker(**SGD)
    undisturbed.train(make_rows(), NLLLoss())
    trained_worker.get_reference_policy_logprobs(make_rows())
    for worker in (trained_worker, undisturbed):
        worker.train(make_rows(seed=1), NLLLoss())
    assert same(weights_of(trained_worker), weights_of(undisturbed))


def test_a_policy_without_reference_raises(make_worker, make_rows):
    worker = make_worker(init_reference_model=False)
    with pytest.raises(ConfigError, match="no reference model, because it was created with init_reference_model=False"):
        worker.get_reference_policy_logprobs(make_rows())
