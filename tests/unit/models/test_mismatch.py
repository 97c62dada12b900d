"""Each fault of an engine is named from its evidence, and rounding is not a fault."""

from __future__ import annotations

import pytest
import torch

from lucidrl.models.generation.config import GenerationConfig, MismatchConfig
from lucidrl.models.generation.mismatch import (
    Evidence,
    Fault,
    Sampling,
    candidate_samplings,
    diagnose,
    logprobs_under,
    num_excluded,
)
from lucidrl.models.generation.sampling import draw

SETTING = Sampling(0.7, top_k=8, top_p=0.9)
NEW = {"a": "1", "b": "2", "c": "3"}
OLD = {"a": "7", "b": "8", "c": "9"}


@pytest.fixture
def logits() -> torch.Tensor:
    """[N, V] before the temperature."""
    return 2 * torch.randn(200, 30, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def tokens(logits) -> torch.Tensor:
    """[N], sampled as configured."""
    uniform = torch.rand(len(logits), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return draw(logits / SETTING.temperature, uniform, top_k=SETTING.top_k, top_p=SETTING.top_p)[0]


def evidence_of(engine, logits, tokens, **changes) -> Evidence:
    candidates = candidate_samplings(SETTING)
    explained = logprobs_under(logits, tokens, candidates)
    known = {
        "subject": "generator 0",
        "engine_N": engine,
        "policy_N": under(logits, tokens, 0.7),
        "warn_above": 0.01,
        "stop_above": 1.0,
        "setting": SETTING,
        "explanations": dict(zip(candidates, explained, strict=True)),
        "version": 3,
        "expected_version": 3,
        "checksum": NEW,
        "expected_checksum": NEW,
        "previous_checksum": OLD,
    }
    return Evidence(**{**known, **changes})


def under(logits, tokens, temperature, top_k=0, top_p=1.0):
    """Log-probabilities computed token by token, apart from `logprobs_under`."""
    result = []
    for row, token in zip((logits / temperature).softmax(-1).double(), tokens.tolist(), strict=True):
        order = row.argsort(descending=True).tolist()
        kept = order[: top_k or len(order)]
        total, running, nucleus = float(row[kept].sum()), 0.0, []
        for candidate in kept:
            if running >= top_p * total:
                break
            nucleus.append(candidate)
            running += float(row[candidate])
        result.append(float((row[token] / row[nucleus].sum()).log()) if token in nucleus else -torch.inf)
    return torch.tensor(result)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.3, top_k=3), Sampling(0.7, 0, 0.6), Sampling(1.0, 9, 0.8)]
)
def test_log_probabilities_under_a_sampling_are_those_of_a_plain_loop(logits, sampling):
    every = torch.arange(200) % 30
    expected = under(logits, every, sampling.temperature, sampling.top_k, sampling.top_p)
    [found] = logprobs_under(logits, every, [sampling])
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
    assert num_excluded(logits, every, sampling, slack=0.0) == int(expected.isinf().sum())


def test_tokens_that_were_sampled_as_configured_are_inside(logits, tokens):
    assert num_excluded(logits, tokens, SETTING, slack=0.01) == 0
    free = draw(logits / 0.7, torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0]
    assert num_excluded(logits, free, SETTING, slack=0.01) > 5


def test_rounding_is_clean(logits, tokens):
    noise = 0.005 * torch.randn(200, generator=torch.Generator().manual_seed(3))
    assert diagnose(evidence_of(under(logits, tokens, 0.7) + noise, logits, tokens)) is None


@pytest.mark.parametrize(
    ("sampling", "fault"),
    [
        (Sampling(1.0), Fault.TEMPERATURE),
        (Sampling(0.5), Fault.TEMPERATURE),
        (Sampling(0.7, top_p=0.9), Fault.TRUNCATION),
        (Sampling(0.7, top_k=8), Fault.TRUNCATION),
        (SETTING, Fault.TRUNCATION),
        (Sampling(1.0, top_k=8, top_p=0.9), Fault.TRUNCATION),
    ],
)
def test_a_mistaken_sampling_is_named(logits, tokens, sampling, fault):
    engine = under(logits, tokens, sampling.temperature, sampling.top_k, sampling.top_p).nan_to_num(neginf=-9.0)
    chosen = engine > -9.0
    diagnosis = diagnose(evidence_of(engine[chosen], logits[chosen], tokens[chosen]))
    assert diagnosis.fault is fault
    assert str(sampling) in diagnosis.message
    assert str(SETTING) in diagnosis.message


def test_tokens_outside_the_truncation_are_a_fault_even_with_right_log_probabilities(logits, tokens):
    diagnosis = diagnose(evidence_of(under(logits, tokens, 0.7), logits, tokens, num_excluded=4))
    assert diagnosis.fault is Fault.TRUNCATION
    assert "4 of 200 tokens" in diagnosis.message


def test_other_probabilities_are_not_called_truncation_because_other_tokens_are_likely(logits, tokens):
    engine = under(logits, tokens, 0.7) + 0.1 * torch.randn(200, generator=torch.Generator().manual_seed(6))
    diagnosis = diagnose(evidence_of(engine, logits, tokens, num_excluded=4))
    assert diagnosis.fault is Fault.PRECISION


@pytest.mark.parametrize(
    ("changes", "fault", "names"),
    [
        ({"version": 2}, Fault.STALE_VERSION, ()),
        ({"checksum": OLD}, Fault.STALE_VERSION, ("a", "b", "c")),
        ({"checksum": NEW | {"b": "8"}}, Fault.MISSING_TENSOR, ("b",)),
        ({"checksum": {"a": "1", "b": "2"}}, Fault.MISSING_TENSOR, ("c",)),
        ({"checksum": {"a": "1", "b": "2"}, "previous_checksum": {}}, Fault.MISSING_TENSOR, ("c",)),
        ({"checksum": NEW | {"b": "5"}}, Fault.WRONG_TENSOR, ("b",)),
        ({"checksum": NEW | {"b": "5"}, "previous_checksum": {}}, Fault.WRONG_TENSOR, ("b",)),
        ({"checksum": NEW | {"b": "3", "c": "2"}}, Fault.WRONG_TENSOR, ("b", "c")),
        ({"checksum": NEW | {"b": "8", "c": "5"}}, Fault.WRONG_TENSOR, ("c",)),
    ],
)
def test_other_weights_are_named_and_stop_the_run_whatever_the_difference(logits, tokens, changes, fault, names):
    diagnosis = diagnose(evidence_of(under(logits, tokens, 0.7), logits, tokens, stop_above=None, **changes))
    assert (diagnosis.fault, diagnosis.names) == (fault, names)
    assert diagnosis.is_gross


def test_names_that_the_policy_does_not_send_are_no_fault(logits, tokens):
    extra = {**NEW, "lm_head.weight": "4"}
    assert diagnose(evidence_of(under(logits, tokens, 0.7), logits, tokens, checksum=extra)) is None


def test_a_stale_engine_that_reports_no_checksums_is_found_by_its_log_probabilities(logits, tokens):
    before = under(logits + 0.2 * torch.randn_like(logits), tokens, 0.7)
    diagnosis = diagnose(evidence_of(before + 1e-4, logits, tokens, checksum=None, before_N=before))
    assert diagnosis.fault is Fault.STALE_VERSION


def test_the_first_refit_tells_a_head_that_stayed_old_from_rounding(logits, tokens):
    engine = under(logits, tokens, 0.7) + 0.03 * torch.randn(200, generator=torch.Generator().manual_seed(4))
    at_first = evidence_of(engine, logits, tokens, usual=1e-5)
    assert diagnose(at_first).fault is Fault.MISSING_TENSOR
    assert "tied head" in diagnose(at_first).message
    always = diagnose(evidence_of(engine, logits, tokens, usual=0.02))
    assert always.fault is Fault.PRECISION
    assert not always.is_gross


def test_a_gross_difference_without_an_explanation_stops_the_run(logits, tokens):
    noise = 5 * torch.randn(200, generator=torch.Generator().manual_seed(5))
    diagnosis = diagnose(evidence_of(under(logits, tokens, 0.7) + noise, logits, tokens))
    assert diagnosis.fault is Fault.UNEXPLAINED
    assert diagnosis.is_gross


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_never_clean(logits, tokens, value):
    engine = under(logits, tokens, 0.7)
    engine[3] = value
    assert diagnose(evidence_of(engine, logits, tokens)).is_gross


def test_the_limit_of_warnings_follows_the_precision():
    limits = GenerationConfig().mismatch
    assert limits.warn_above("float64") == limits.warn_above("float32") < limits.warn_above("bfloat16") < limits.stop
    assert MismatchConfig(warn=0.5).warn_above("float32") == 0.5


def test_the_difference_of_all_tokens_decides_although_only_some_are_explained(logits, tokens):
    policy = under(logits, tokens, 0.7)
    engine = policy.clone()
    engine[100:] -= 3.0
    few = {"explained_engine_N": engine[:50], "explained_policy_N": policy[:50]}
    explanations = dict.fromkeys(candidate_samplings(SETTING), policy[:50])
    diagnosis = diagnose(evidence_of(engine, logits, tokens, explanations=explanations, **few))
    assert diagnosis.fault is Fault.UNEXPLAINED
    assert diagnosis.is_gross
    assert "mean absolute difference 1.5 nats" in diagnosis.message


@pytest.mark.parametrize("side", ["the policy", "the engine"])
def test_log_probabilities_that_are_not_finite_name_their_side(logits, tokens, side):
    policy, engine = under(logits, tokens, 0.7), under(logits, tokens, 0.7)
    {"the policy": policy, "the engine": engine}[side][7] = torch.nan
    diagnosis = diagnose(evidence_of(engine, logits, tokens, policy_N=policy))
    assert f"{side} has log-probabilities that are not finite" in diagnosis.message
    assert diagnosis.is_gross


def test_a_difference_that_stops_the_run_is_never_clean():
    assert MismatchConfig(stop=0.1).warn_above("bfloat16") == 0.1
    assert MismatchConfig(stop=None).warn_above("bfloat16") == 0.25


def test_rounding_at_the_edge_of_top_p_excludes_nothing():
    probabilities = torch.tensor([[0.803, 0.15, 0.047]])
    second = torch.tensor([1])
    assert num_excluded(probabilities.log(), second, Sampling(1.0, top_p=0.8), slack=0.0) == 1
    assert num_excluded(probabilities.log(), second, Sampling(1.0, top_p=0.8), slack=0.05) == 0
    assert num_excluded(probabilities.log(), second, Sampling(1.0, top_p=0.7), slack=0.05) == 1
