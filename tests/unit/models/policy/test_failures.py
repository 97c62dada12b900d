"""Nonfinite gradients, failing losses and invalid batches change nothing; the error names the cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import DataError, TrainingError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.worker import PolicyWorker
from tests.tiers import slow_except

ADAMW = {"kwargs": {"lr": 0.01, "weight_decay": 0.1}}
KINDS = [DTensorPolicyWorker, FSDP1PolicyWorker]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


class NaNLoss(NLLLoss):
    """NaN for micro-batches with the named samples."""

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


@pytest.mark.parametrize("precision", slow_except(["float32", "bfloat16"], "bfloat16"))
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
    worker.train(named_rows, NaNLoss())  # resets the counter
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


@pytest.mark.parametrize("precision", slow_except(["float64", "bfloat16"], "bfloat16"))
def test_a_loss_that_raises_changes_nothing(make_worker, make_rows, weights_of, precision):
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


@pytest.mark.parametrize("missing", ["input_lengths", "input_ids"])
def test_a_batch_that_cannot_be_scored_is_refused(make_worker, make_rows, missing):
    rows = make_rows()
    del rows[missing]
    for score in (make_worker().get_logprobs, make_worker().get_reference_policy_logprobs):
        with pytest.raises(DataError, match=f"the batch has no {missing}; get_logprobs needs input_ids, input_lengths"):
            score(rows)


@pytest.mark.parametrize("length", [17, -1])
def test_lengths_beyond_the_width_of_the_columns_are_refused(make_worker, make_rows, batching, length):
    rows, worker = make_rows(), make_worker(**batching)
    rows["input_lengths"][2] = length
    for call in (worker.get_logprobs, lambda rows: worker.train(rows, NLLLoss())):
        with pytest.raises(
            DataError, match=rf"row 2 has input_lengths={length}, but .* hold 16 tokens; set .* from 0 to 16"
        ):
            call(rows)


@pytest.mark.parametrize(("count", "gbs"), [(8, 3), (4, 8), (0, 4)])
def test_rows_that_do_not_fill_global_batches_are_refused(make_worker, make_rows, count, gbs):
    with pytest.raises(DataError, match=f"{count} rows do not split into global batches of {gbs}"):
        make_worker().train(make_rows().slice(0, count), NLLLoss(), gbs=gbs)


# On two ranks


class RaisingLoss(NLLLoss):
    """Raises for micro-batches with the named samples, at once or in their backward pass."""

    def __init__(self, *names: str, in_backward: bool = False):
        self.names, self.in_backward = set(names), in_backward

    def __call__(self, outputs, data, global_valid_seqs, global_valid_toks):
        if self.names & set(data["idx"]):
            if not self.in_backward:
                self.fail()
            outputs.logprobs.register_hook(self.fail)
        return super().__call__(outputs, data, global_valid_seqs, global_valid_toks)

    def fail(self, *args):
        raise RuntimeError("this loss fails")


def make_on_ranks(kind: type[PolicyWorker], precision: str) -> PolicyWorker:
    small = {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 1}
    return kind(PolicyConfig(precision=precision, optimizer=ADAMW, **small), embedded_tokenizer())


def trained_on(worker: PolicyWorker, rows: BatchedDataDict[Any]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return loss, gradient norm and full weights of one step."""
    result = worker.train(rows, NLLLoss())
    weights = {name: tensor.clone() for name, tensor in worker.sharding.full_weights()}
    return float(result["global_loss"]), float(result["grad_norm"]), weights


def train_past_an_error(kind: type[PolicyWorker], precision: str, in_backward: bool, rows: dict[str, Any]) -> bool:
    """Return whether a worker whose loss raised in micro-batch 3 of 4 then trains like one without an error."""
    failed, fine = make_on_ranks(kind, precision), make_on_ranks(kind, precision)
    own = BatchedDataDict(rows).chunk(failed.rank, 2)
    with pytest.raises(RuntimeError, match="this loss fails"):
        failed.train(own, RaisingLoss("sample-2", "sample-6", in_backward=in_backward))
    (*numbers, weights), (*expected_numbers, expected) = trained_on(failed, own), trained_on(fine, own)
    return numbers == expected_numbers and same(weights, expected)


@pytest.mark.parametrize("in_backward", slow_except([False, True], True))
@pytest.mark.parametrize("precision", slow_except(["float64", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("kind", slow_except(KINDS, KINDS[0]))
def test_a_loss_that_raises_on_ranks_changes_nothing(two_ranks, named_rows, kind, precision, in_backward):
    assert two_ranks(train_past_an_error, kind, precision, in_backward, named_rows.get_dict()) == [True, True]


def train_with_all_rows_on_rank_0(kind: type[PolicyWorker], precision: str, rows: dict[str, Any]) -> Any:
    worker, data = make_on_ranks(kind, precision), BatchedDataDict(rows)
    return trained_on(worker, data if worker.rank == 0 else data.slice(0, 0))


@pytest.mark.parametrize("precision", slow_except(["float32", "float64"], "float64"))
@pytest.mark.parametrize("kind", slow_except(KINDS, KINDS[0]))
def test_a_rank_without_rows_joins_the_collectives(two_ranks, named_rows, kind, precision):
    rows, tolerance = named_rows.get_dict(), 1e-9 if precision == "float64" else 5e-5
    loss, grad_norm, weights = train_with_all_rows_on_rank_0(kind, precision, rows)
    for result in two_ranks(train_with_all_rows_on_rank_0, kind, precision, rows):
        assert result[:2] == pytest.approx((loss, grad_norm), rel=tolerance)
        for name, tensor in result[2].items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=tolerance, msg=name)
