"""The driver's handle: its arguments, and its calls of the workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.place import Place
from lucidrl.errors import ConfigError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.policy import policy as policy_module
from lucidrl.models.policy.policy import Policy


def test_a_plain_mapping_is_a_config(tiny_model, tokenizer, make_rows):
    mapping = {"model_name": tiny_model("llama"), "dtensor_cfg": {"enabled": False}}
    with Policy(mapping, tokenizer, init_optimizer=False) as policy:
        assert policy.group.run_all("__repr__") == ["FSDP1PolicyWorker[rank=0]"]
        scored = policy.with_scores(make_rows(), previous=True, reference=False)
    assert scored["prev_logprobs"].any()


def test_a_mapping_with_an_unknown_key_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="modelname"):
        Policy({"modelname": "embedded"}, tokenizer)


@pytest.mark.parametrize(("start", "call"), [(120.0, 4.0), (4.0, 120.0)])
def test_collectives_have_the_longer_of_the_two_timeouts(monkeypatch, tokenizer, start, call):
    """Other ranks wait while rank 0 reads the weights, even if call_timeout_s is short."""
    passed: list[dict[str, Any]] = []
    group = SimpleNamespace(run_all=lambda method: [Place("node", "127.0.0.1", "CPU-node-0")])
    monkeypatch.setattr(
        policy_module, "WorkerGroup", lambda kind, args, options, **rest: passed.append(options) or group
    )
    Policy({}, tokenizer, cluster=ClusterConfig(num_workers=2, start_timeout_s=start, call_timeout_s=call))
    assert [options["timeout_s"] for options in passed] == [120.0]


def test_a_policy_without_an_optimizer_is_saved_and_loaded_without_one(tiny_model, tokenizer, make_rows, tmp_path):
    mapping = {"model_name": tiny_model("llama")}
    with Policy(mapping, tokenizer) as trained, Policy(mapping, tokenizer, init_optimizer=False) as scoring:
        trained.train(make_rows(), NLLLoss())
        trained.save(tmp_path / "trained")
        scoring.load(tmp_path / "trained")
        scoring.save(tmp_path / "scored")
        expected, found = (
            policy.with_scores(make_rows(), previous=True, reference=False)["prev_logprobs"]
            for policy in (trained, scoring)
        )
    assert torch.equal(found, expected)
    assert not (tmp_path / "scored" / "optimizer").exists()
    weights = "policy/model.safetensors"
    assert (tmp_path / "scored" / weights).read_bytes() == (tmp_path / "trained" / weights).read_bytes()


def test_setting_the_policy_version_calls_no_worker(monkeypatch, tiny_model, tokenizer):
    prompts = BatchedDataDict({"input_ids": torch.full((2, 3), 7), "input_lengths": torch.full((2,), 3)})
    config = {"model_name": tiny_model("llama"), "generation": {"max_new_tokens": 1}}
    with Policy(config, tokenizer, init_optimizer=False, init_reference_model=False) as policy:
        with monkeypatch.context() as patch:
            patch.setattr(policy, "group", None)
            policy.update_weights(7)
        assert policy.generate(prompts)["policy_versions"].tolist() == [7, 7]


@pytest.mark.slow
def test_rows_with_the_same_prompt_sample_differently_on_any_rank(tiny_model, tokenizer):
    rows = BatchedDataDict({"input_ids": torch.full((4, 3), 7), "input_lengths": torch.full((4,), 3)})
    config = {"model_name": tiny_model("llama"), "generation": {"max_new_tokens": 8}}
    two = ClusterConfig(num_workers=2, num_threads=1)
    with Policy(config, tokenizer, cluster=two, init_optimizer=False, init_reference_model=False) as policy:
        completions = policy.generate(rows)["output_ids"]
    assert len({tuple(row) for row in completions.tolist()}) == 4
