"""Many ranks compute what one rank computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GemmaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import TrainingError
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.nll import NLLLoss
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.worker import PolicyWorker
from tests.tiers import slow_except

SGD = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}}, "max_grad_norm": 0.7}
FIXED = {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 2, "logprob_batch_size": 3}
DYNAMIC = {
    "sequence_packing": {"enabled": False},
    "dynamic_batching": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 60},
}
PACKED = {"sequence_packing": {"train_mb_tokens": 30, "logprob_mb_tokens": 45}}
KINDS = [DTensorPolicyWorker, FSDP1PolicyWorker]
every_kind = pytest.mark.parametrize("kind", KINDS)
TOLERANCE = {"float64": 1e-9, "float32": 5e-5}
FLOAT32_ULP = 1e-6
"""Log-probabilities are always float32: equal float64 values up to the last digit may round differently."""


def own_rows(worker: PolicyWorker, rows: dict[str, Any]) -> BatchedDataDict[Any]:
    data, layout = BatchedDataDict(rows), worker.mesh.layout
    share = data.size // layout.dp
    start = layout.data_rank(worker.rank) * share
    return data.slice(start, start + share)


def gathered_weights(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.sharding.full_weights()}


def three_steps(kind: type[PolicyWorker], options: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Train three times on this rank's share of the rows; return the full results on every rank."""
    worker = kind(PolicyConfig(**options), embedded_tokenizer(), seed=1)
    own = own_rows(worker, rows)
    loss_fn = ClippedPGLoss(ClippedPGConfig(entropy_coefficient=0.01, kl_coefficient=0.1), on_policy=False)
    scored = {"before": worker.get_logprobs(own)["logprobs"]}
    own["prev_logprobs"] = scored["before"] - 0.1
    own["reference_policy_logprobs"] = worker.get_reference_policy_logprobs(own)["reference_logprobs"]
    results = [worker.train(own, loss_fn) for _ in range(3)]
    scored["after"] = worker.get_logprobs(own)["logprobs"]
    scored["reference"] = worker.get_reference_policy_logprobs(own)["reference_logprobs"]
    return {
        "losses": torch.cat([result["global_loss"] for result in results]),
        "grad_norms": torch.stack([result["grad_norm"] for result in results]),
        "metrics": results[-1]["metrics"],
        "weights": gathered_weights(worker),
        "data_rank": worker.mesh.layout.data_rank(worker.rank),
        **scored,
    }


def assert_equal_to_one_rank(results: list[dict[str, Any]], one: dict[str, Any], tolerance: float) -> None:
    for result in results:
        for name in ("losses", "grad_norms"):
            torch.testing.assert_close(result[name], one[name], rtol=tolerance, atol=tolerance)
        # The number of computed tokens counts padding, which depends on the layout.
        metrics, expected = ({**each["metrics"], "computed_tokens": 0} for each in (result, one))
        assert metrics == pytest.approx(expected, rel=100 * tolerance, abs=tolerance)
        assert result["weights"].keys() == one["weights"].keys()
        for name, weights in result["weights"].items():
            torch.testing.assert_close(weights, one["weights"][name], rtol=tolerance, atol=tolerance, msg=name)
        for name in ("before", "after", "reference"):
            rows = len(result[name])
            expected = one[name][result["data_rank"] * rows : (result["data_rank"] + 1) * rows]
            torch.testing.assert_close(result[name], expected, rtol=tolerance, atol=max(tolerance, FLOAT32_ULP))


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([19, 7, 12, 16, 5, 18, 11, 9])
    mask = (torch.arange(19) >= 3) & (torch.arange(19) < lengths[:, None])
    return {
        "input_ids": torch.randint(2, 90, (8, 19), generator=generator) * (torch.arange(19) < lengths[:, None]),
        "input_lengths": lengths,
        "token_mask": mask.long(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1]),
        "advantages": torch.randn(8, generator=generator),
        "generation_logprobs": -torch.rand(8, 19, generator=generator),
        "idx": [f"row {number}" for number in range(8)],
    }


@pytest.fixture(scope="module")
def one_rank(rows):
    """Return a cached function: the results of one rank with some options."""
    known: dict[str, dict[str, Any]] = {}

    def run(options: dict[str, Any]) -> dict[str, Any]:
        alone = {**options, "dtensor_cfg": {}}
        if repr(alone) not in known:
            known[repr(alone)] = three_steps(DTensorPolicyWorker, alone, rows)
        return known[repr(alone)]

    return run


def check(ranks, one_rank, rows, precision="float64", kind=DTensorPolicyWorker, **options):
    options = {"model_name": "embedded", "precision": precision, **SGD, **options}
    assert_equal_to_one_rank(ranks(three_steps, kind, options, rows), one_rank(options), TOLERANCE[precision])


@pytest.mark.parametrize("batching", slow_except([FIXED, DYNAMIC, PACKED], PACKED), ids=["fixed", "dynamic", "packed"])
@pytest.mark.parametrize("precision", slow_except(["float64", "float32"], "float64"))
@every_kind
def test_data_parallel(two_ranks, one_rank, rows, kind, batching, precision):
    check(two_ranks, one_rank, rows, precision, kind, **batching)


LAYOUTS = {
    "tp2": {"tensor_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "tp2_sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "tp2_plan": {"tensor_parallel_size": 2, "custom_parallel_plan": "tests.unit.models.policy.test_fsdp2.MLP_ONLY"},
    "offload": {"cpu_offload": True},
    "checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "tp2", "cp2"))
def test_two_ranks(two_ranks, one_rank, rows, layout):
    check(two_ranks, one_rank, rows, **FIXED, dtensor_cfg=LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_in_float32(two_ranks, one_rank, rows, tiny_model, layout):
    options = {"model_name": tiny_model("llama"), "dtensor_cfg": LAYOUTS[layout]}
    check(two_ranks, one_rank, rows, "float32", **FIXED, **options)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_dynamic_batches_of_rows_that_ranks_share(two_ranks, one_rank, rows, tiny_model, layout):
    check(two_ranks, one_rank, rows, **DYNAMIC, model_name=tiny_model("llama"), dtensor_cfg=LAYOUTS[layout])


FOUR = {
    "dp4": {},
    "dp2_tp2": {"tensor_parallel_size": 2},
    "cp2_tp2": {"context_parallel_size": 2, "tensor_parallel_size": 2},
    "cp2_dp2": {"context_parallel_size": 2},
    "cp2_tp2_sequence": {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", slow_except(FOUR))
def test_four_ranks(four_ranks, one_rank, rows, layout):
    check(four_ranks, one_rank, rows, **FIXED, dtensor_cfg=FOUR[layout])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision"), [("llama", "float32"), ("llama_untied", "float64")])
@pytest.mark.parametrize("layout", ["dp2_tp2", "cp2_tp2"])
def test_four_ranks_in_float32_and_with_untied_embeddings(
    four_ranks, one_rank, rows, tiny_model, layout, model, precision
):
    check(four_ranks, one_rank, rows, precision, **FIXED, model_name=tiny_model(model), dtensor_cfg=FOUR[layout])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_float32_weights_and_learns_as_float32_does(two_ranks, one_rank, rows, precision):
    options = {"model_name": "embedded", "precision": precision, **SGD, **FIXED}
    exact = one_rank({**options, "precision": "float32"})
    ranks = two_ranks(three_steps, DTensorPolicyWorker, options, rows)
    for result in (*ranks, one_rank(options)):
        # Only the first step: later steps start from differently rounded weights.
        torch.testing.assert_close(result["losses"][0], exact["losses"][0], rtol=0.05, atol=0.02, check_dtype=False)
        torch.testing.assert_close(result["grad_norms"][0], exact["grad_norms"][0], rtol=0.05, atol=0.02)
    assert {weights.dtype for result in ranks for weights in result["weights"].values()} == {torch.float32}


ARCHITECTURES = ["llama_untied", "qwen2", "qwen3", "mistral_sliding", "gemma2_sliding_capped", "phi_head_bias"]


@pytest.mark.parametrize("parallel", slow_except(["dp2", "tp2", "cp2"], "tp2"))
@pytest.mark.parametrize("architecture", slow_except(ARCHITECTURES, "qwen3"))
def test_architectures(two_ranks, one_rank, rows, tiny_model, architecture, parallel):
    layout = {"dp2": {}, **LAYOUTS}[parallel]
    check(two_ranks, one_rank, rows, **FIXED, model_name=tiny_model(architecture), dtensor_cfg=layout)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["dp2", "tp2"])
def test_gemma(two_ranks, one_rank, rows, save_model, parallel):
    """Gemma 1 scales its embeddings, and its norm weights are near 0."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = save_model(GemmaConfig(vocab_size=len(embedded_tokenizer()), **sizes, **heads, initializer_range=0.3))
    check(two_ranks, one_rank, rows, **FIXED, model_name=folder, dtensor_cfg={"dp2": {}, **LAYOUTS}[parallel])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["offload", "checkpointing"])
def test_fsdp1_layouts(two_ranks, one_rank, rows, layout):
    check(two_ranks, one_rank, rows, kind=FSDP1PolicyWorker, **FIXED, dtensor_cfg=LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama_untied", "phi_head_bias", "gpt2_learned_positions"])
def test_fsdp1_architectures(two_ranks, one_rank, rows, tiny_model, architecture):
    check(two_ranks, one_rank, rows, kind=FSDP1PolicyWorker, **PACKED, model_name=tiny_model(architecture))


@pytest.mark.slow
def test_fsdp1_on_four_ranks(four_ranks, one_rank, rows):
    check(four_ranks, one_rank, rows, kind=FSDP1PolicyWorker, **FIXED)


# Communication and memory


def make_worker(kind: type[PolicyWorker], **options: Any) -> PolicyWorker:
    return kind(PolicyConfig(**{"precision": "float64", **SGD, **FIXED, **options}), embedded_tokenizer(), seed=1)


class Exchanges(TorchDispatchMode):
    """Records the dtype of each gradient that ranks reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "reduce_scatter" in str(function):
            self.dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


def exchanged(kind: type[PolicyWorker], precision: str, mbs: int, rows: dict[str, Any]) -> list[torch.dtype]:
    worker = make_worker(kind, precision=precision)
    with Exchanges() as exchanges:
        worker.train(own_rows(worker, rows), NLLLoss(), mbs=mbs)
    return exchanges.dtypes


@every_kind
def test_gradients_are_reduced_once_per_step_for_any_number_of_micro_batches(two_ranks, rows, kind):
    layers_and_rest = 4 + 1
    assert two_ranks(exchanged, kind, "float64", 1, rows) == [[torch.float64] * layers_and_rest] * 2


@every_kind
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_gradients_are_reduced_in_float32(two_ranks, rows, kind, precision):
    for dtypes in two_ranks(exchanged, kind, precision, 4, rows):
        assert set(dtypes) == {torch.float32}


def calls_of_layers(kind: type[PolicyWorker], is_checkpointed: bool, rows: dict[str, Any]) -> int:
    worker = make_worker(kind, dtensor_cfg={"activation_checkpointing": is_checkpointed})
    calls: list[None] = []
    for module in worker.model.modules():
        if isinstance(module, LlamaMLP):
            module.register_forward_pre_hook(lambda *_: calls.append(None))
    worker.train(own_rows(worker, rows), NLLLoss(), mbs=4)
    return len(calls)


@every_kind
def test_activation_checkpointing_computes_every_layer_twice(two_ranks, rows, kind):
    assert two_ranks(calls_of_layers, kind, False, rows) == [4, 4]
    assert two_ranks(calls_of_layers, kind, True, rows) == [8, 8]


class WatchingLoss(NLLLoss):
    """Records whether there is an autograd graph."""

    def __init__(self) -> None:
        self.has_graph: set[bool] = set()

    def __call__(self, outputs, data, global_valid_seqs, global_valid_toks):
        self.has_graph.add(outputs.logprobs.requires_grad)
        return super().__call__(outputs, data, global_valid_seqs, global_valid_toks)


def graphs(kind: type[PolicyWorker], rows: dict[str, Any]) -> tuple[set[bool], set[bool]]:
    worker, evaluated, trained = make_worker(kind), WatchingLoss(), WatchingLoss()
    worker.train(own_rows(worker, rows), evaluated, eval_mode=True)
    worker.train(own_rows(worker, rows), trained)
    return evaluated.has_graph, trained.has_graph


@every_kind
def test_evaluation_keeps_nothing_for_a_backward_pass(two_ranks, rows, kind):
    assert two_ranks(graphs, kind, rows) == [({False}, {True})] * 2


class NaNLoss(NLLLoss):
    """NaN for micro-batches with the named row."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, outputs, data, global_valid_seqs, global_valid_toks):
        loss, metrics = super().__call__(outputs, data, global_valid_seqs, global_valid_toks)
        return loss * (float("nan") if self.name in data["idx"] else 1.0), metrics


def train_with_a_nan(kind: type[PolicyWorker], options: dict[str, Any], rows: dict[str, Any]) -> tuple[int, bool, str]:
    """Return skipped steps of the first call, whether weights are unchanged, and the error of the second call."""
    worker = make_worker(kind, max_nonfinite_steps=2, train_micro_batch_size=1, **options)
    before = gathered_weights(worker)
    result = worker.train(own_rows(worker, rows), NaNLoss("row 5"))
    after = gathered_weights(worker)
    is_same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with pytest.raises(TrainingError) as raised:
        worker.train(own_rows(worker, rows), NaNLoss("row 5"))
    return result["num_skipped_steps"], is_same, str(raised.value)


@every_kind
@pytest.mark.parametrize("precision", slow_except(["float64", "float16"], "float16"))
def test_a_nan_on_one_rank_skips_the_step_and_all_ranks_name_its_sample(two_ranks, rows, kind, precision):
    for num_skipped, is_same, message in two_ranks(train_with_a_nan, kind, {"precision": precision}, rows):
        assert (num_skipped, is_same) == (1, True)
        assert "in 2 optimizer steps in a row (last in samples row 5);" in message
