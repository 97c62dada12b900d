"""The reference policy takes the model's place for a while, and always gives it back."""

from __future__ import annotations

import pytest
import torch

from lucidrl.algorithms.losses import NLLLoss
from lucidrl.errors import ConfigError
from lucidrl.models.policy.reference import ReferencePolicy

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


def test_own_weights_come_back(trained_worker, weights_of):
    own = weights_of(trained_worker)
    for _ in range(2):
        with trained_worker.use_reference_model():
            assert not same(weights_of(trained_worker), own)
        assert same(weights_of(trained_worker), own)


def test_own_weights_come_back_after_an_exception(trained_worker, weights_of):
    own = weights_of(trained_worker)
    with pytest.raises(RuntimeError, match="inside"), trained_worker.use_reference_model():
        raise RuntimeError("inside")
    assert same(weights_of(trained_worker), own)


def test_own_weights_come_back_when_the_exchange_fails_half_way(monkeypatch, trained_worker, weights_of):
    own = weights_of(trained_worker)
    exchange, calls = ReferencePolicy._exchange, []

    def failing(self, weights, kept):
        calls.append(weights)
        if len(calls) == 4:
            raise MemoryError("no more")
        exchange(self, weights, kept)

    monkeypatch.setattr(ReferencePolicy, "_exchange", failing)
    with pytest.raises(MemoryError), trained_worker.use_reference_model():
        pytest.fail("the block must not run with a mixture of weights")
    assert same(weights_of(trained_worker), own)


def test_training_goes_on_after_the_exchange(trained_worker, make_worker, make_rows, weights_of):
    undisturbed = make_worker(**SGD)
    undisturbed.train(make_rows(), NLLLoss())
    trained_worker.get_reference_policy_logprobs(make_rows())
    for worker in (trained_worker, undisturbed):
        worker.train(make_rows(seed=1), NLLLoss())
    assert same(weights_of(trained_worker), weights_of(undisturbed))


def test_a_policy_without_reference_says_so(make_worker, make_rows):
    worker = make_worker(init_reference_model=False)
    with pytest.raises(ConfigError, match="init_reference_model=False; it has no reference policy"):
        worker.get_reference_policy_logprobs(make_rows())
