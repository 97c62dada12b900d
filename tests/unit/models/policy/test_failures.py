"""Bad gradients, failing losses and unusable batches: nothing is changed by them, and the message names the cause."""

from __future__ import annotations

import pytest
import torch

from lucidrl.algorithms.losses import NLLLoss
from lucidrl.errors import DataError, TrainingError

ADAMW = {"kwargs": {"lr": 0.01, "weight_decay": 0.1}}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


class NaNLoss(NLLLoss):
    """Not a number where the named samples are in the micro-batch."""

    def __init__(self, *names: str):
        self.names = set(names)

    def __call__(self, outputs, data, global_valid_seqs, global_valid_toks):
        loss, metrics = super().__call__(outputs, data, global_valid_seqs, global_valid_toks)
        return loss * (float("nan") if self.names & set(data["idx"]) else 1.0), metrics


@pytest.fixture
def named_rows(make_rows):
    rows = make_rows()
    rows["idx"] = [f"sample-{number}" for number in range(8)]
    return rows


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_with_nan_gradients_is_skipped_and_counted(make_worker, named_rows, weights_of, precision):
    worker = make_worker(precision=precision, optimizer=ADAMW)
    worker.train(named_rows, NaNLoss())
    before = weights_of(worker)
    result = worker.train(named_rows, NaNLoss("sample-1"))
    assert result["num_skipped_steps"] == 1
    assert result["grad_norm"].isnan()
    assert same(weights_of(worker), before)
    half = worker.train(named_rows, NaNLoss("sample-1"), gbs=4)
    assert half["num_skipped_steps"] == 1
    assert not same(weights_of(worker), before)


def test_too_many_skipped_steps_in_a_row_name_the_samples(make_worker, named_rows, weights_of):
    worker = make_worker(max_nonfinite_steps=3, train_micro_batch_size=2, sequence_packing={"enabled": False})
    bad = NaNLoss("sample-5")
    for _ in range(2):
        worker.train(named_rows, bad)
    worker.train(named_rows, NaNLoss())  # starts the count again
    before = weights_of(worker)
    for _ in range(2):
        worker.train(named_rows, bad)
    with pytest.raises(TrainingError, match=r"3 optimizer steps in a row \(last in samples sample-4, sample-5\)"):
        worker.train(named_rows, bad)
    assert same(weights_of(worker), before)


class FailingLoss(NLLLoss):
    """Fails in the second micro-batch."""

    calls = 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the loss failed")
        return super().__call__(*args)


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_loss_that_fails_leaves_no_trace(make_worker, make_rows, weights_of, precision):
    options = {
        "optimizer": ADAMW,
        "precision": precision,
        "sequence_packing": {"enabled": False},
        "train_micro_batch_size": 2,
    }
    worker, undisturbed = make_worker(**options), make_worker(**options)
    with pytest.raises(RuntimeError, match="the loss failed"):
        worker.train(make_rows(seed=1), FailingLoss())
    assert not worker.model.training
    assert all(parameter.grad is None for parameter in worker.model.parameters())
    for each in (worker, undisturbed):
        each.train(make_rows(), NLLLoss())
    assert same(weights_of(worker), weights_of(undisturbed))


@pytest.mark.parametrize("missing", ["token_mask", "sample_mask", "input_lengths", "input_ids"])
def test_a_batch_that_lacks_a_column_is_refused(make_worker, make_rows, missing):
    rows = make_rows()
    del rows[missing]
    with pytest.raises(DataError, match=f"the batch has no {missing}; train needs"):
        make_worker().train(rows, NLLLoss())


@pytest.mark.parametrize(("count", "gbs"), [(8, 3), (4, 8), (0, 4)])
def test_rows_that_do_not_make_whole_global_batches_are_refused(make_worker, make_rows, count, gbs):
    with pytest.raises(DataError, match=f"{count} rows do not split into global batches of {gbs}"):
        make_worker().train(make_rows().slice(0, count), NLLLoss(), gbs=gbs)
