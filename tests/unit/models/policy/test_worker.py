"""The worker trains like a bare PyTorch loop for every way of batching, and scoring matches training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.interfaces import LossType, valid_token_mask
from lucidrl.losses.nll import NLLLoss
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.losses.reductions import Mean
from lucidrl.models import logprobs as logprobs_module
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.head import token_logprobs
from tests.tiers import slow_except

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}},
    "adamw": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01, "weight_decay": 0.1}},
}
EXACT = {"precision": "float64", "optimizer": OPTIMIZERS["sgd"]}
TEMPERATURE = 0.7


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)


def bare_loop(folder: str, optimizer_config: dict[str, Any], global_batches) -> tuple[Any, list[float], float]:
    """Return model, losses and last gradient norm of a bare loop, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    optimizer_class = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer_config["name"][12:].lower()]
    optimizer = optimizer_class(model.parameters(), **optimizer_config["kwargs"])
    losses, norm = [], 0.0
    for batch in global_batches:
        mask = valid_token_mask(batch)
        total = torch.zeros((), dtype=torch.float64)
        for row, length in enumerate(batch["input_lengths"].tolist()):
            tokens = batch["input_ids"][row, :length]
            log_p = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
            total = total - (log_p.gather(1, tokens[1:, None])[:, 0] * mask[row, 1:length]).sum()
        loss = total / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norm


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("gbs", slow_except([8, 4], 4), ids=["one_step", "two_steps"])
def test_training_equals_a_bare_loop(make_worker, make_rows, weights_of, batching, optimizer, gbs):
    rows = make_rows()
    rows["sample_mask"][5] = 0
    worker = make_worker(precision="float64", optimizer=optimizer, generation={"temperature": TEMPERATURE}, **batching)
    folder = worker.config.model_name
    model, losses, norm = bare_loop(folder, optimizer, [rows.slice(i, i + gbs) for i in range(0, 8, gbs)])
    result = worker.train(rows, NLLLoss(), gbs=gbs)
    close(weights_of(worker), dict(model.named_parameters()))
    assert result["global_loss"].tolist() == pytest.approx(losses, abs=1e-9)
    assert result["grad_norm"].item() == pytest.approx(norm, rel=1e-6)
    assert result["num_skipped_steps"] == 0


def test_the_call_can_set_the_micro_batch_size(make_worker, make_rows, weights_of):
    workers = [make_worker(**EXACT, sequence_packing={"enabled": False}) for _ in range(3)]
    counts = []
    for worker, mbs in zip(workers, (1, 3, None), strict=True):
        counts.append(len(worker.train(make_rows(), NLLLoss(), mbs=mbs)["all_mb_metrics"]["nll"]))
    assert counts == [8, 3, 1]
    close(weights_of(workers[0]), weights_of(workers[2]))
    close(weights_of(workers[1]), weights_of(workers[2]))


def test_the_call_overrides_the_configured_micro_batches(make_worker, make_rows, weights_of, batching):
    worker, other = make_worker(**EXACT, **batching), make_worker(**EXACT)
    assert len(worker.train(make_rows(), NLLLoss(), mbs=3)["all_mb_metrics"]["nll"]) == 3
    other.train(make_rows(), NLLLoss())
    close(weights_of(worker), weights_of(other))


def test_the_call_sets_the_rows_per_scoring_micro_batch(make_worker, make_rows, batching):
    worker, rows, sizes = make_worker(precision="float64", **batching), make_rows(), []
    expected = worker.get_logprobs(rows)["logprobs"]
    worker.model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0])))
    scored = worker.get_logprobs(rows, micro_batch_size=3)["logprobs"]
    assert sizes == [3, 3, 2]
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-6)


def test_the_global_batch_size_can_come_from_the_config(make_worker, make_rows):
    worker = make_worker(**EXACT, train_global_batch_size=2)
    assert worker.train(make_rows(), NLLLoss())["global_loss"].shape == (4,)


def test_result_has_the_documented_entries(make_worker, make_rows):
    rows = make_rows()
    rows["sample_mask"][3] = 0
    worker = make_worker(**EXACT, sequence_packing={"enabled": False})
    result = worker.train(rows, NLLLoss(), gbs=4, mbs=2)
    num_tokens = [int(valid_token_mask(rows.slice(start, start + 4)).sum()) for start in (0, 4)]
    per_micro_batch = result["all_mb_metrics"]
    assert result["rank"] == 0
    assert per_micro_batch["lr"] == [0.1] * 4
    assert per_micro_batch["global_valid_seqs"] == [3.0, 3.0, 4.0, 4.0]
    assert per_micro_batch["global_valid_toks"] == [float(n) for n in num_tokens for _ in range(2)]
    assert sum(per_micro_batch["num_valid_samples"]) == 7
    assert result["metrics"]["num_valid_tokens"] == sum(num_tokens)


def test_the_reported_rate_is_the_one_that_was_used(make_worker, make_rows):
    """The schedule advances once per call, not once per optimizer step."""
    halving = {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}}
    worker = make_worker(**EXACT, scheduler=halving)
    rates = [worker.train(make_rows(), NLLLoss(), gbs=4)["metrics"]["lr"] for _ in range(3)]
    assert rates == pytest.approx([0.1, 0.05, 0.025])


def test_masked_rows_change_nothing(make_worker, make_rows, weights_of, batching):
    rows = make_rows()
    rows["sample_mask"][[2, 3]] = 0
    others = rows.select_indices([0, 1, 4, 5, 6, 7])
    first, second = make_worker(**EXACT, **batching), make_worker(**EXACT, **batching)
    first.train(rows, NLLLoss())
    second.train(others, NLLLoss())
    close(weights_of(first), weights_of(second))


def test_a_batch_without_a_valid_row_changes_nothing(make_worker, make_rows, weights_of):
    rows = make_rows()
    rows["sample_mask"][:4] = 0
    worker = make_worker(**EXACT)
    before = weights_of(worker)
    result = worker.train(rows.slice(0, 4), NLLLoss())
    assert result["global_loss"].tolist() == [0.0]
    assert same(weights_of(worker), before)
    assert worker.train(rows, NLLLoss(), gbs=4)["global_loss"].isfinite().all()


def test_rows_of_one_token_change_nothing(make_worker, make_rows, weights_of, batching):
    worker = make_worker(**EXACT, **batching)
    before = weights_of(worker)
    result = worker.train(make_rows(lengths=(1, 1, 1)), NLLLoss())
    assert result["global_loss"].tolist() == [0.0]
    assert same(weights_of(worker), before)


def test_only_tokens_that_count_go_through_the_head(monkeypatch, make_worker, make_rows, batching):
    worker, rows, scored = make_worker(**batching), make_rows(), []
    rows["sample_mask"][3] = 0

    def spy(hidden, head, targets, transform, **options):
        scored.append(len(targets))
        return token_logprobs(hidden, head, targets, transform, **options)

    monkeypatch.setattr(logprobs_module, "token_logprobs", spy)
    worker.train(rows, NLLLoss())
    assert sum(scored) == valid_token_mask(rows).sum()


@pytest.mark.parametrize("temperature", slow_except([0.7, 1.3], 1.3))
def test_the_ratio_of_training_to_scoring_is_one(make_worker, make_rows, batching, temperature):
    worker = make_worker("embedded", generation={"temperature": temperature}, **batching)
    rows = make_rows()
    rows["prev_logprobs"] = worker.get_logprobs(rows)["logprobs"]
    rows["advantages"] = torch.linspace(-1, 1, 8)
    metrics = worker.train(rows, ClippedPGLoss(ClippedPGConfig()))["metrics"]
    # Log-probabilities of random tokens reach -15, where float32 resolves 1e-6.
    assert metrics["ratio/min"] == pytest.approx(1.0, abs=5e-6)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=5e-6)


def test_temperature_is_part_of_the_policy(make_worker, make_rows):
    rows = make_rows()
    cold, hot = (make_worker("embedded", generation={"temperature": t}).get_logprobs(rows) for t in (0.7, 1.3))
    assert (cold["logprobs"] - hot["logprobs"]).abs().max() > 0.1


def test_scores_are_in_row_order(make_worker, make_rows, batching):
    rows = make_rows()
    worker = make_worker(precision="float64", **batching)
    together = worker.get_logprobs(rows)["logprobs"]
    assert together.shape == rows["input_ids"].shape
    assert together.dtype == torch.float32
    for row in range(rows.size):
        alone = worker.get_logprobs(rows.slice(row, row + 1))["logprobs"]
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-6)
    beyond = torch.arange(16) >= rows["input_lengths"][:, None]
    assert not together[beyond].any()
    assert not together[:, 0].any()
    assert (together[:, 1:] < 0).sum() == (rows["input_lengths"] - 1).sum()


def test_scoring_keeps_no_graph_and_accepts_an_empty_batch(make_worker, make_rows):
    worker = make_worker()
    assert not worker.get_logprobs(make_rows())["logprobs"].requires_grad
    assert worker.get_logprobs(make_rows().slice(0, 0))["logprobs"].shape == (0, 16)


def test_dropout_is_off_everywhere(make_worker, make_rows):
    worker = make_worker("gpt2_learned_positions")  # its config enables dropout
    rows = make_rows()
    scores = worker.get_logprobs(rows)["logprobs"]
    assert torch.equal(worker.get_logprobs(rows)["logprobs"], scores)
    evaluated = [worker.train(rows, NLLLoss(), eval_mode=True)["global_loss"].item() for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    assert worker.train(rows, NLLLoss())["global_loss"].item() == evaluated[0]


def test_evaluation_changes_nothing(make_worker, make_rows, weights_of, batching):
    worker = make_worker(precision="float64", optimizer=OPTIMIZERS["adamw"], **batching)
    worker.train(make_rows(), NLLLoss())
    weights, state = weights_of(worker), worker.optimizer.state_dict()["optimizer"]["state"]
    moments = {key: value.clone() for key, value in state[0].items()}
    rng = torch.random.get_rng_state()
    result = worker.train(make_rows(seed=1), NLLLoss(), eval_mode=True, gbs=4)
    assert result["global_loss"].shape == (2,)
    assert not result["global_loss"].requires_grad
    assert same(weights_of(worker), weights)
    assert same(worker.optimizer.state_dict()["optimizer"]["state"][0], moments)
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert all(parameter.grad is None for parameter in worker.model.parameters())
    assert not worker.model.training


def test_evaluation_returns_the_loss_of_training(make_worker, make_rows):
    worker = make_worker(**EXACT)
    evaluated = worker.train(make_rows(), NLLLoss(), eval_mode=True)["global_loss"]
    assert torch.equal(evaluated, worker.train(make_rows(), NLLLoss())["global_loss"])


def test_without_optimizer_a_worker_scores_and_evaluates_but_does_not_train(make_worker, make_rows, tmp_path):
    worker = make_worker(init_optimizer=False)
    worker.get_logprobs(make_rows())
    assert worker.train(make_rows(), NLLLoss(), eval_mode=True)["metrics"]["lr"] == 0.0
    worker.save_checkpoint(str(tmp_path))
    worker.load_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match=r"train needs an optimizer, but .* create it with init_optimizer=True"):
        worker.train(make_rows(), NLLLoss())


def test_gradients_are_dropped_after_a_step(make_worker, make_rows):
    for precision in ("float32", "bfloat16"):
        worker = make_worker(precision=precision)
        worker.train(make_rows(), NLLLoss())
        assert all(parameter.grad is None for parameter in worker.model.parameters())


class BareLogitsLoss:
    """Negative log-likelihood from logits."""

    loss_type = LossType.TOKEN_LEVEL
    needs = frozenset({"logits"})

    def __call__(self, outputs, data, global_valid_seqs, global_valid_toks):
        assert isinstance(outputs, torch.Tensor)
        log_p = torch.log_softmax(outputs[:, :-1], dim=-1)
        nll = -log_p.gather(2, data["input_ids"][:, 1:, None])[..., 0] * valid_token_mask(data)[:, 1:]
        return nll.sum() / global_valid_toks, {"mean_nll": Mean(nll.sum().detach(), 1.0)}


@pytest.mark.parametrize("architecture", ["llama", "gemma2_sliding_capped", "phi_head_bias"])
def test_a_loss_over_bare_logits_trains_the_same(make_worker, make_rows, weights_of, batching, architecture):
    options = {**EXACT, **batching, "generation": {"temperature": TEMPERATURE}}
    first, second = make_worker(architecture, **options), make_worker(architecture, **options)
    own = first.train(make_rows(), BareLogitsLoss())
    ours = second.train(make_rows(), NLLLoss())
    assert own["global_loss"].tolist() == pytest.approx(ours["global_loss"].tolist(), abs=1e-9)
    # Gemma2 computes its norms in float32.
    close(weights_of(first), weights_of(second), tolerance=1e-6 if architecture.startswith("gemma2") else 1e-9)


def test_bfloat16_trains_on_float32_masters(make_worker, make_rows, weights_of):
    """At a rate far below the precision of bfloat16, the model still learns."""
    options = {"precision": "bfloat16", "optimizer": {"kwargs": {"lr": 1e-4, "weight_decay": 0.0}}}
    worker = make_worker(**options)
    before = weights_of(worker)
    assert {value.dtype for value in before.values()} == {torch.bfloat16}
    worker.train(make_rows(), NLLLoss())
    norm = "model.norm.weight"
    assert torch.equal(weights_of(worker)[norm], before[norm])  # all ones: the step is lost in rounding
    for _ in range(60):
        worker.train(make_rows(), NLLLoss())
    assert not torch.equal(weights_of(worker)[norm], before[norm])
    masters = worker.optimizer.state_dict()["masters"]
    assert {master.dtype for master in masters} == {torch.float32}
    for parameter, master in zip(worker.model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.to(torch.bfloat16))


def test_the_repr_names_class_and_rank(make_worker):
    assert repr(make_worker()) == "DTensorPolicyWorker[rank=0]"


@pytest.mark.parametrize("temperature", slow_except([0.7, 1.3], 1.3))
def test_the_ratio_is_one_to_a_millionth_for_completions_in_equal_micro_batches(make_worker, temperature):
    worker = make_worker(
        "embedded",
        precision="float32",
        generation={"temperature": temperature, "max_new_tokens": 8},
        sequence_packing={"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 512},
    )
    prompts = torch.tensor([render_prompt(worker.tokenizer, [{"role": "user", "content": "12+30="}])] * 16)
    start = prompts.shape[1]
    data = BatchedDataDict({"input_ids": prompts, "input_lengths": torch.full((16,), start)})
    output = BuiltinGenerator(worker.model, worker.tokenizer, worker.config.generation).generate(data)
    lengths, position = output["unpadded_sequence_lengths"], torch.arange(output["output_ids"].shape[1])
    rows = BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": lengths,
            "token_mask": ((position >= start) & (position < lengths[:, None])).float(),
            "sample_mask": torch.ones(16),
            "advantages": torch.linspace(-1, 1, 16),
        }
    )
    rows["prev_logprobs"] = worker.get_logprobs(rows)["logprobs"]
    metrics = worker.train(rows, ClippedPGLoss(ClippedPGConfig()))["metrics"]
    assert metrics["ratio/min"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-6)
