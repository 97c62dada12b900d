"""FSDP1 on two ranks generates, saves and fails like one rank. For training and scoring, see test_ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lucidrl.checkpoint.tensors import open_tensors
from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError, DataError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy import sharding
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker

ADAMW = {"optimizer": {"kwargs": {"lr": 0.01, "weight_decay": 0.1}}}
SMALL_MICRO_BATCHES = {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 1}
Tensors = dict[str, torch.Tensor]


def make_worker(**options: Any) -> FSDP1PolicyWorker:
    arguments = {name: options.pop(name) for name in ("weights_path", "optimizer_path") if name in options}
    return FSDP1PolicyWorker(
        PolicyConfig(**{"precision": "float64", **ADAMW, **options}), embedded_tokenizer(), **arguments
    )


def own_share(worker: FSDP1PolicyWorker, rows: dict[str, Any]) -> BatchedDataDict[Any]:
    data = BatchedDataDict(rows)
    share = data.size // worker.mesh.layout.dp
    return data.slice(worker.rank * share, (worker.rank + 1) * share)


def weights_of(worker: FSDP1PolicyWorker) -> Tensors:
    return {name: tensor.clone() for name, tensor in worker.sharding.full_weights()}


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_close(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.fixture
def rows(make_rows) -> dict[str, Any]:
    return make_rows().get_dict() | {"idx": [f"row {number}" for number in range(8)]}


class NaNLoss(NLLLoss):
    """NaN for micro-batches with the named rows."""

    def __init__(self, *names: str):
        self.names = set(names)

    def __call__(self, outputs, data, global_valid_seqs, global_valid_toks):
        loss, metrics = super().__call__(outputs, data, global_valid_seqs, global_valid_toks)
        return loss * (float("nan") if self.names & set(data["idx"]) else 1.0), metrics


# Generation


def prompts() -> dict[str, Any]:
    """Rank 0's rows end at per-row stop strings; some rows of rank 1 are longer."""
    texts = ["12+30=", "7+8=", "12+30=", "40+41=", "3+3=", "25+50="]
    ids = [render_prompt(embedded_tokenizer(), [{"role": "user", "content": text}]) for text in texts]
    width = max(map(len, ids))
    return {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        "input_lengths": torch.tensor([len(row) for row in ids]),
        "draw_keys": torch.arange(6) + 11,
        "stop_strings": [list("0123456789"), list("13579"), list("02468"), None, ["nowhere"], None],
    }


def completed(greedy: bool, precision: str, temperature: float) -> dict[str, Any]:
    """Return this rank's completions, their scores, and the dtype of generation."""
    generation = {"max_new_tokens": 8, "temperature": temperature}
    worker = make_worker(precision=precision, generation=generation)
    output = worker.generate(own_share(worker, prompts()), greedy)
    scored = worker.get_logprobs(
        BatchedDataDict({"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]})
    )
    with worker.sharding.gathered():
        dtype = worker.model.head.weight.dtype
    return {**output.get_dict(), "scored": scored["logprobs"], "dtype": dtype}


@pytest.mark.parametrize("greedy", [True, False])
def test_generation_on_two_ranks_is_that_of_one(two_ranks, greedy):
    alone = completed(greedy, "float32", 1.3)
    for rank, result in enumerate(two_ranks(completed, greedy, "float32", 1.3)):
        mine = slice(3 * rank, 3 * rank + 3)
        lengths = result["unpadded_sequence_lengths"]
        assert torch.equal(lengths, alone["unpadded_sequence_lengths"][mine])
        for row in range(3):
            tokens = slice(0, int(lengths[row]))
            assert torch.equal(result["output_ids"][row, tokens], alone["output_ids"][mine][row, tokens])
    # The ranks decoded different numbers of tokens.
    first, second = alone["generation_lengths"].split(3)
    assert first.max() < second.max()


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.4)])
def test_scoring_matches_the_logprobs_of_generation(two_ranks, precision, tolerance):
    for result in two_ranks(completed, False, precision, 0.7):
        position = torch.arange(result["output_ids"].shape[1])
        start = result["unpadded_sequence_lengths"] - result["generation_lengths"]
        is_completion = (position >= start[:, None]) & (position < result["unpadded_sequence_lengths"][:, None])
        assert not result["logprobs"][~is_completion].any()
        difference = (result["logprobs"] - result["scored"])[is_completion].abs()
        assert difference.max() < tolerance
        assert difference.mean() < tolerance / 8
        assert str(result["dtype"]) == f"torch.{precision}"


def generate_a_prompt_that_is_too_long(rows: dict[str, Any]) -> bool:
    worker = make_worker()
    before = worker.get_logprobs(own_share(worker, rows))["logprobs"]
    too_long = {"input_ids": torch.ones(1, 512, dtype=torch.int64), "input_lengths": torch.tensor([512])}
    good = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "input_lengths": torch.tensor([4])}
    try:
        worker.generate(BatchedDataDict(too_long if worker.rank == 0 else good))
    except DataError:
        assert worker.rank == 0
    return torch.equal(worker.get_logprobs(own_share(worker, rows))["logprobs"], before)


def test_a_failed_generation_on_one_rank_does_not_change_the_model(two_ranks, rows):
    assert two_ranks(generate_a_prompt_that_is_too_long, rows) == [True, True]


# Checkpoints


def trained(steps: int, rows: dict[str, Any], load: str | None, save: str | None, precision: str) -> Tensors:
    """Return full weights after some steps between two checkpoints."""
    loaded = {"weights_path": f"{load}/weights", "optimizer_path": f"{load}/optimizer"} if load else {}
    worker = make_worker(precision=precision, **loaded)
    for _ in range(steps):
        worker.train(own_share(worker, rows), NLLLoss())
    if save:
        worker.save_checkpoint(f"{save}/weights", f"{save}/optimizer", f"{save}/weights")
    return weights_of(worker)


def test_one_rank_resumes_a_checkpoint_of_two_ranks(two_ranks, rows, tmp_path):
    folder = str(tmp_path)
    saved, _ = two_ranks(trained, 2, rows, None, folder, "float64")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float64)
    assert same(dict(read.named_parameters()), saved)
    assert_close(trained(1, rows, folder, None, "float64"), trained(3, rows, None, None, "float64"))


def test_two_ranks_resume_a_checkpoint_of_one_rank(two_ranks, rows, tmp_path):
    folder = str(tmp_path)
    saved = trained(2, rows, None, folder, "float64")
    for loaded in two_ranks(trained, 0, rows, folder, None, "float64"):
        assert same(loaded, saved)
    expected = trained(3, rows, None, None, "float64")
    for resumed in two_ranks(trained, 1, rows, folder, None, "float64"):
        assert_close(resumed, expected)


@pytest.mark.slow
def test_two_ranks_in_half_precision_resume_bit_exactly(two_ranks, rows, tmp_path):
    """Weights in the checkpoint are rounded; master weights are not."""
    folder = str(tmp_path)
    two_ranks(trained, 2, rows, None, folder, "bfloat16")
    saved = open_tensors(tmp_path / "weights", "model")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    expected, _ = two_ranks(trained, 3, rows, None, None, "bfloat16")
    resumed, _ = two_ranks(trained, 1, rows, folder, None, "bfloat16")
    assert same(resumed, expected)


# Training


def evaluate(rows: dict[str, Any]) -> bool:
    worker = make_worker()
    worker.train(own_share(worker, rows), NLLLoss())
    before = weights_of(worker)
    evaluated = worker.train(own_share(worker, rows), NLLLoss(), eval_mode=True, gbs=4)
    assert evaluated["global_loss"].shape == (2,)
    assert all(parameter.grad is None for parameter in worker.sharding.parameters())
    return same(weights_of(worker), before)


def test_evaluation_changes_nothing(two_ranks, rows):
    assert two_ranks(evaluate, rows) == [True, True]


def train_past_a_nan(rows: dict[str, Any]) -> tuple[int, bool]:
    worker = make_worker(**SMALL_MICRO_BATCHES)
    before = weights_of(worker)
    result = worker.train(own_share(worker, rows), NaNLoss("row 6"))
    return result["num_skipped_steps"], same(weights_of(worker), before)


def test_a_nan_on_one_rank_skips_the_step_on_all(two_ranks, rows):
    assert two_ranks(train_past_a_nan, rows) == [(1, True), (1, True)]


def norm_of_repeated(times: int, rows: dict[str, Any]) -> float:
    worker = make_worker(precision="bfloat16", **SMALL_MICRO_BATCHES)
    own = own_share(worker, rows).slice(3, 4).repeat_interleave(times)
    return float(worker.train(own, NLLLoss())["grad_norm"])


@pytest.mark.slow
def test_half_precision_gradients_of_many_micro_batches_add_up_in_float32(two_ranks, rows):
    """A mean over the same row 32 times: small additions to a bfloat16 sum would be lost."""
    for once, often in zip(*(two_ranks(norm_of_repeated, times, rows) for times in (1, 32)), strict=True):
        assert often == pytest.approx(once, rel=1e-6)


# Shards


def start_where_only_rank_0_may_read() -> tuple[int, int, set[torch.dtype]]:
    load_model = sharding.load_model

    def guarded(*args, **kwargs):
        assert torch.distributed.get_rank() == 0
        return load_model(*args, **kwargs)

    sharding.load_model = guarded
    try:
        worker = make_worker(precision="bfloat16")
    finally:
        sharding.load_model = load_model
    parameters = list(worker.model.parameters())
    total = sum(tensor.numel() for tensor in weights_of(worker).values())
    return sum(parameter.numel() for parameter in parameters), total, {parameter.dtype for parameter in parameters}


def test_only_rank_0_reads_weights_and_each_rank_holds_half_in_float32(two_ranks):
    for held, total, dtypes in two_ranks(start_where_only_rank_0_may_read):
        assert 0 <= held - total / 2 <= 5  # five units, each padded to an even size
        assert dtypes == {torch.float32}


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "context_parallel_size"])
def test_other_parallelism_is_refused(axis):
    with pytest.raises(
        ConfigError, match=rf"dtensor_cfg\.{axis}=2 is not supported by FSDP1, which is data parallel only; set it to 1"
    ):
        make_worker(sequence_packing={"enabled": False}, dtensor_cfg={axis: 2})


# Host memory


def test_on_a_cpu_manual_offload_returns_the_model_as_it_is():
    worker = make_worker()
    memory = [parameter.data_ptr() for parameter in worker.model.parameters()]
    assert worker.manual_offload_to_cpu(worker.model) is worker.model
    assert worker.manual_load_to_gpu(worker.model) is worker.model
    assert [parameter.data_ptr() for parameter in worker.model.parameters()] == memory
