"""Refits of adapters, and the guard: a wrong scale of the adapters is found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import RefitError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation import separate
from lucidrl.models.generation.mismatch import Evidence, Fault, candidate_scales, diagnose
from lucidrl.models.generation.probe import probe_tokens
from lucidrl.models.generation.refit_guard import adapter_explanations
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.lora import merge_adapters
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.policy import Policy
from tests.unit.models.policy.faulty_generators import ADAPTER_SCALE, FaultyGenerator

SETTINGS: dict[str, Any] = {
    "model_name": "embedded",
    "lora": {"rank": 4, "alpha": 16.0},
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}},
}


@pytest.fixture
def rows() -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(0)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(2, 90, (8, 16), generator=generator),
            "input_lengths": torch.full((8,), 16),
            "token_mask": torch.ones(8, 16),
            "sample_mask": torch.ones(8),
        }
    )


def test_only_wrong_scales_are_candidates():
    assert 1.0 not in candidate_scales(16, 4).values()
    assert candidate_scales(16, 4)["1, without alpha and rank"] == 0.25
    assert "1, without alpha and rank" not in candidate_scales(8, 8)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [(1.0, "1, without alpha and rank"), (16.0, "alpha = 16, not divided"), (0.0, "0, so without the adapter")],
)
def test_a_wrong_scale_of_an_adapter_is_named(rows, scaling, named):
    config = PolicyConfig(**SETTINGS)
    with Policy(config, embedded_tokenizer(), init_reference_model=False) as policy:
        for _ in range(4):
            policy.train(rows, NLLLoss())
        probe = torch.tensor([probe_tokens(embedded_tokenizer())])
        lengths, selected = torch.tensor([probe.shape[1]]), torch.ones_like(probe, dtype=torch.bool)
        selected[:, 0] = False
        own = policy.group.run_all("scorer.probe", probe, lengths)[0][selected]
        explanations = adapter_explanations(policy.group, config.lora, probe, lengths, selected)
        factor = scaling / config.lora.scaling
        [engine_BT] = policy.group.run_all("scorer.probe_adapters", probe, lengths, [factor])[0]
    evidence = Evidence("generator 0", engine_BT[selected], own, warn_above=0.01, adapter_explanations=explanations)
    found = diagnose(evidence)
    assert found is not None
    assert found.fault is Fault.ADAPTER_SCALE
    assert named in found.message
    assert "pass policy.lora.alpha and policy.lora.rank to the engine" in found.message


@pytest.mark.slow
@pytest.mark.parametrize("refit", ["ipc", "collective"])
def test_replicas_take_adapters_alone_and_a_wrong_scale_stops_the_run(rows, monkeypatch, refit):
    monkeypatch.setitem(separate.ENGINES, "builtin", FaultyGenerator)
    generation = {"placement": "separate", "max_new_tokens": 8, "refit": refit, "mismatch": {"stop": 0.5}}
    config = PolicyConfig(**SETTINGS, generation=generation)
    prompts: BatchedDataDict[Any] = BatchedDataDict({"input_ids": rows["input_ids"][:2, :6]})
    prompts["input_lengths"] = torch.tensor([6, 6])
    with (
        Policy(config, embedded_tokenizer(), init_reference_model=False) as policy,
        SeparateGenerator(policy, config, embedded_tokenizer()) as generator,
    ):
        for version in range(3):
            generator.update_weights(version)
            assert generator.guard.difference < 1e-5
            assert generator.guard.diagnosis is None
            policy.train(rows, NLLLoss())
        generator.update_weights(3)
        replies, own = generator.generate(prompts, greedy=True), policy.generate(prompts, greedy=True)
        assert torch.equal(replies["output_ids"], own["output_ids"])
        [worker] = generator.pool.workers
        assert len(policy.group.run_all("export.sent_checksums")[0]) == 2 * 28
        worker.run("inject", ADAPTER_SCALE)
        for _ in range(3):
            policy.train(rows, NLLLoss())
        with pytest.raises(RefitError, match=r"adapter scale .*alpha = 16, not divided by the rank"):
            generator.update_weights(4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_merge_gap_is_what_merging_changes(rows, precision):
    config = PolicyConfig(**SETTINGS, precision=precision)
    worker = DTensorPolicyWorker(config, embedded_tokenizer(), init_reference_model=False)
    for _ in range(4):
        worker.train(rows, NLLLoss())
    before = worker.get_logprobs(rows)["logprobs"]
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    separate_BT, gap = worker.scorer.probe(ids, lengths), worker.scorer.merge_gap(ids, lengths)
    assert torch.equal(worker.get_logprobs(rows)["logprobs"], before)
    merge_adapters(worker.model)
    merged_BT = worker.scorer.probe(ids, lengths)
    assert gap == pytest.approx(float((merged_BT - separate_BT)[:, 1:].double().abs().mean()), rel=1e-6)
    assert (1e-3 < gap < 0.2) if precision == "bfloat16" else (gap < 1e-5)
