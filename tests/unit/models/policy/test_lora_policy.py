"""A policy with LoRA trains, saves, sends and resumes its adapters alone, on one rank and on several."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.nll import NLLLoss
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.models.embedded import embedded_model, embedded_tokenizer
from lucidrl.models.loading import load_model, load_tokenizer
from lucidrl.models.lora import adapted_layers
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.policy import Policy
from lucidrl.models.policy.worker import PolicyWorker
from tests.tiers import slow_except

LORA = {"rank": 4, "alpha": 8.0}
ADAMW = {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.02}}}


def worker_of(model_name: str = "embedded", **options: Any) -> DTensorPolicyWorker:
    config = PolicyConfig(**{"model_name": model_name, "lora": LORA, **ADAMW, **options})
    return DTensorPolicyWorker(config, embedded_tokenizer(), seed=1)


def weights_of(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in worker.sharding.full_weights()}


def own_rows(worker: PolicyWorker, rows: dict[str, Any]) -> BatchedDataDict[Any]:
    layout = worker.mesh.layout
    share = len(rows["input_ids"]) // layout.dp
    start = layout.data_rank(worker.rank) * share
    return BatchedDataDict(rows).slice(start, start + share)


def trained(options: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Train three times on this rank's share of the rows; return the results on every rank."""
    worker = worker_of(**options)
    own = own_rows(worker, rows)
    loss_fn = ClippedPGLoss(ClippedPGConfig(kl_coefficient=0.1), on_policy=False)
    own["prev_logprobs"] = worker.get_logprobs(own)["logprobs"] - 0.1
    own["reference_policy_logprobs"] = worker.get_reference_policy_logprobs(own)["reference_logprobs"]
    results = [worker.train(own, loss_fn) for _ in range(3)]
    return {
        "losses": torch.cat([result["global_loss"] for result in results]),
        "grad_norms": torch.stack([result["grad_norm"] for result in results]),
        "weights": weights_of(worker),
        "merged": {name: weight.clone() for name, weight in worker.sharding.merged_weights()},
        "after": worker.get_logprobs(own)["logprobs"],
        "reference": worker.get_reference_policy_logprobs(own)["reference_logprobs"],
        "gap": worker.scorer.merge_gap(own["input_ids"], own["input_lengths"]),
        "data_rank": worker.mesh.layout.data_rank(worker.rank),
    }


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([19, 7, 12, 16, 5, 18, 11, 9])
    mask = (torch.arange(19) >= 3) & (torch.arange(19) < lengths[:, None])
    return {
        "input_ids": torch.randint(2, 90, (8, 19), generator=generator) * (torch.arange(19) < lengths[:, None]),
        "input_lengths": lengths,
        "token_mask": mask.long(),
        "sample_mask": torch.ones(8),
        "advantages": torch.randn(8, generator=generator),
        "generation_logprobs": -torch.rand(8, 19, generator=generator),
    }


@pytest.fixture(scope="module")
def one_rank(rows) -> dict[str, Any]:
    return trained({"precision": "float64"}, rows)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2_sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "offload": {"cpu_offload": True},
    "checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "dp2", "tp2"))
def test_two_ranks_compute_what_one_rank_computes(two_ranks, one_rank, rows, layout):
    is_split = layout in ("tp2_sequence", "cp2")
    packing = {"sequence_packing": {"enabled": not is_split}}
    options = {"precision": "float64", "dtensor_cfg": LAYOUTS[layout], **packing}
    for result in two_ranks(trained, options, rows):
        for name in ("losses", "grad_norms"):
            torch.testing.assert_close(result[name], one_rank[name], rtol=1e-9, atol=1e-9)
        for kind in ("weights", "merged"):
            assert result[kind].keys() == one_rank[kind].keys()
            for name, weight in result[kind].items():
                torch.testing.assert_close(weight, one_rank[kind][name], rtol=1e-7, atol=1e-7, msg=name)
        for name in ("after", "reference"):
            share = len(result[name])
            expected = one_rank[name][result["data_rank"] * share :][:share]
            torch.testing.assert_close(result[name], expected, rtol=1e-6, atol=1e-6)


BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {"share_prefixes": False, "sequence_packing": {"enabled": False}, "train_micro_batch_size": 3},
    "packed": {"share_prefixes": False, "sequence_packing": {"train_mb_tokens": 40}},
    "checkpointing": {"dtensor_cfg": {"activation_checkpointing": True}},
}


@pytest.mark.parametrize("batching", BATCHINGS)
def test_micro_batches_packing_and_shared_prefixes_do_not_change_the_result(one_rank, rows, batching):
    result = trained({"precision": "float64", **BATCHINGS[batching]}, rows)
    for name in ("losses", "grad_norms"):
        torch.testing.assert_close(result[name], one_rank[name], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_ranks_in_half_precision_with_dropout_agree(two_ranks, rows, tensor_parallel_size):
    options = {
        "precision": "bfloat16",
        "lora": {**LORA, "dropout": 0.2},
        "dtensor_cfg": {"tensor_parallel_size": tensor_parallel_size, "activation_checkpointing": True},
    }
    first, second = two_ranks(trained, options, rows)
    assert torch.equal(first["losses"], second["losses"])
    assert first["losses"].isfinite().all()
    assert all(torch.equal(weight, second["merged"][name]) for name, weight in first["merged"].items())


def test_only_adapters_learn_and_the_reference_is_the_model_without_them(rows, one_rank):
    base = DTensorPolicyWorker(PolicyConfig(precision="float64"), embedded_tokenizer())
    expected = base.get_logprobs(BatchedDataDict(rows))["logprobs"]
    torch.testing.assert_close(one_rank["reference"], expected)
    assert not torch.allclose(one_rank["after"], expected, atol=1e-3)
    assert one_rank["gap"] < 1e-6
    assert all(name.endswith(("lora_A", "lora_B")) for name in one_rank["weights"])
    before = {name for name, _ in embedded_model(warm=True, seed=0, attn_implementation="eager").named_parameters()}
    assert one_rank["merged"].keys() == before


def test_optimizer_and_gradients_are_as_small_as_the_adapters(rows):
    worker = worker_of(max_grad_norm=None)
    worker.train(BatchedDataDict(rows), NLLLoss())
    adapters = sum(weight.nbytes for weight in worker.sharding.local_weights())
    moments = sum(tensor.nbytes for tensor in worker.optimizer.own_tensors() if tensor.dim())
    assert moments == 2 * adapters
    total = sum(weight.nbytes for weight in worker.model.parameters())
    assert adapters < 0.06 * total
    assert worker.scorer._reference is not None  # without a copy of the weights
    assert not any(isinstance(value, list) for value in vars(worker.scorer._reference).values())


@pytest.mark.parametrize("precision", slow_except(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_resumed_policy_continues_bit_identically(rows, tmp_path, precision, dropout):
    options = {"lora": {**LORA, "dropout": dropout}, "precision": precision}
    options["dtensor_cfg"] = {"activation_checkpointing": dropout > 0}
    data, loss_fn = BatchedDataDict(rows), NLLLoss()
    first = worker_of(**options)
    torch.manual_seed(3)
    first.train(data, loss_fn)
    state = torch.get_rng_state()
    first.save_checkpoint(str(tmp_path / "policy"), str(tmp_path / "optimizer"))
    uninterrupted = [float(first.train(data, loss_fn)["global_loss"]) for _ in range(2)]
    second = worker_of(**options)
    second.load_checkpoint(str(tmp_path / "policy"), str(tmp_path / "optimizer"))
    torch.set_rng_state(state)
    assert [float(second.train(data, loss_fn)["global_loss"]) for _ in range(2)] == uninterrupted
    expected = weights_of(first)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(second).items())


def saved_by_two_ranks(options: dict[str, Any], rows: dict[str, Any], folder: str) -> Any:
    worker = worker_of(**options)
    own = own_rows(worker, rows)
    worker.train(own, NLLLoss())
    worker.save_checkpoint(f"{folder}/policy", f"{folder}/optimizer", f"{folder}/policy")
    return worker.get_logprobs(own)["logprobs"]


def test_an_adapter_of_two_ranks_resumes_on_one(two_ranks, rows, tmp_path):
    options = {"precision": "float64", "dtensor_cfg": {"tensor_parallel_size": 2}}
    expected = two_ranks(saved_by_two_ranks, options, rows, str(tmp_path))[0]
    worker = worker_of(precision="float64")
    worker.load_checkpoint(str(tmp_path / "policy"), str(tmp_path / "optimizer"))
    found = worker.get_logprobs(BatchedDataDict(rows))["logprobs"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "layers.0.mlp.up_proj"]], ids=["all", "some"])
def test_a_trained_adapter_loads_in_peft_with_equal_logits(rows, tmp_path, embedded_folder, targets):
    worker = worker_of(str(embedded_folder), precision="float64", lora={**LORA, "target_modules": targets})
    worker.train(BatchedDataDict(rows), NLLLoss())
    worker.save_checkpoint(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float64, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False).eval()
    ids = rows["input_ids"]
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        worker.model.model.config._attn_implementation = "eager"  # as theirs, with a softmax in float32
        found = worker.model.model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert json.loads((tmp_path / "adapter" / "base.json").read_text())["model_name"] == str(embedded_folder)
    files = {path.name: path.stat().st_size for path in (tmp_path / "adapter").iterdir()}
    assert not [name for name in files if name.startswith("model")]


def test_an_adapter_of_peft_is_merged_when_it_is_loaded(rows, tmp_path, embedded_folder):
    base = AutoModelForCausalLM.from_pretrained(embedded_folder, attn_implementation="eager")
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, settings).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_model(str(tmp_path), torch.float32)
    ours.config._attn_implementation = "eager"
    assert not adapted_layers(ours)
    with torch.no_grad():
        expected, found = theirs(input_ids=rows["input_ids"]).logits, ours(input_ids=rows["input_ids"]).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert load_tokenizer(str(tmp_path)).pad_token == embedded_tokenizer().pad_token


def test_a_refit_sends_the_adapters_alone_and_an_engine_without_adapters_gets_merged_weights(rows):
    worker = worker_of(lora={"rank": 8})
    full = worker_of(lora=None)
    merged = worker_of(lora={"rank": 8}, generation={"engine": "vllm", "placement": "separate"})
    sizes = {name: sum(info.size_bytes for info in each.export.infos()) for name, each in vars_of(worker, full, merged)}
    assert sizes["merged"] == sizes["full"]
    assert sizes["adapter"] == sum(weight.nbytes for weight in worker.sharding.local_weights())
    assert [info.name for info in merged.export.infos()] == [info.name for info in full.export.infos()]
    merged.train(BatchedDataDict(rows), NLLLoss())
    sent = dict(merged.export.stream())
    layer = merged.model.model.model.layers[0].mlp.up_proj
    expected = layer.weight + 2.0 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(sent["model.layers.0.mlp.up_proj.weight"], expected)
    assert torch.equal(sent["model.embed_tokens.weight"], full.model.model.model.embed_tokens.weight)


def vars_of(adapter: PolicyWorker, full: PolicyWorker, merged: PolicyWorker) -> list[tuple[str, PolicyWorker]]:
    return [("adapter", adapter), ("full", full), ("merged", merged)]


def test_an_adapter_of_another_base_is_refused_and_both_are_named(rows, tmp_path, embedded_folder):
    worker_of("embedded").save_checkpoint(str(tmp_path / "adapter"))
    worker_of(str(embedded_folder)).load_checkpoint(str(tmp_path / "adapter"))  # the same weights elsewhere
    other = worker_of("embedded-untrained")
    before = weights_of(other)
    with pytest.raises(CheckpointError, match=r"holds an adapter of embedded .checksum") as caught:
        other.load_checkpoint(str(tmp_path / "adapter"))
    assert "but this base is embedded-untrained (checksum" in str(caught.value)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(other).items())


def test_an_adapter_and_a_full_model_do_not_replace_each_other(tmp_path):
    adapted, full = worker_of(), worker_of(lora=None)
    adapted.save_checkpoint(str(tmp_path / "adapter"))
    full.save_checkpoint(str(tmp_path / "full"))
    with pytest.raises(CheckpointError, match="holds an adapter, but this policy trains all weights"):
        full.load_checkpoint(str(tmp_path / "adapter"))
    with pytest.raises(CheckpointError, match=r"holds no adapter .*, but this policy trains one"):
        adapted.load_checkpoint(str(tmp_path / "full"))
    with pytest.raises(CheckpointError, match=r"rank 4 and alpha 8, but policy.lora has rank 4 and alpha 16; set"):
        worker_of(lora={"rank": 4, "alpha": 16}).load_checkpoint(str(tmp_path / "adapter"))


def test_fsdp1_refuses_adapters_on_several_ranks():
    config = PolicyConfig(lora=LORA, dtensor_cfg={"enabled": False})
    with pytest.raises(ConfigError, match=r"policy\.lora trains some weights .* but FSDP1 flattens"):
        FSDP1PolicyWorker.layout_of(config, 2)


def test_muon_trains_adapters(rows):
    worker = worker_of(optimizer={"name": "muon", "kwargs": {"lr": 0.01}})
    losses = [float(worker.train(BatchedDataDict(rows), NLLLoss())["global_loss"]) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_the_base_of_a_new_adapter_may_be_a_merged_one(rows, tmp_path):
    first = worker_of(precision="float64")
    first.train(BatchedDataDict(rows), NLLLoss())
    first.save_checkpoint(str(tmp_path / "first"), tokenizer_path=str(tmp_path / "first"))
    expected = first.get_logprobs(BatchedDataDict(rows))["logprobs"]
    second = worker_of(str(tmp_path / "first"), precision="float64")
    torch.testing.assert_close(second.get_logprobs(BatchedDataDict(rows))["logprobs"], expected)
    reference = second.get_reference_policy_logprobs(BatchedDataDict(rows))["reference_logprobs"]
    torch.testing.assert_close(reference, expected)
    second.save_checkpoint(str(tmp_path / "second"))
    with pytest.raises(CheckpointError, match="holds an adapter of"):
        first.load_checkpoint(str(tmp_path / "second"))


def test_a_policy_generates_with_its_adapters(rows, tmp_path):
    prompts = {name: rows[name][:2] for name in ("input_ids", "input_lengths")}
    with Policy(PolicyConfig(lora=LORA, **ADAMW), embedded_tokenizer(), init_reference_model=False) as policy:
        before = policy.generate(BatchedDataDict(prompts), greedy=True)
        for _ in range(3):
            policy.train(BatchedDataDict(rows), NLLLoss())
        policy.update_weights(1)
        after = policy.generate(BatchedDataDict(prompts), greedy=True)
    longest = min(before["output_ids"].shape[1], after["output_ids"].shape[1])
    assert not torch.equal(before["output_ids"][:, :longest], after["output_ids"][:, :longest])
