"""The guard finds every injected fault of a generator within one step, names it, and is silent otherwise."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from lucidrl.algorithms.mismatch import StepGuard
from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import LucidError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation import separate
from lucidrl.models.generation.mismatch import Diagnosis, Fault, Sampling
from lucidrl.models.generation.probe import probe_tokens
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from tests.unit.models.policy import faulty_generators as faulty

NAMES = {
    faulty.SKIPPED: Fault.STALE_VERSION,
    faulty.PERMUTED: Fault.WRONG_TENSOR,
    faulty.NOT_SENT: Fault.MISSING_TENSOR,
    faulty.STALE_HEAD: Fault.MISSING_TENSOR,
    faulty.TEMPERATURE: Fault.TEMPERATURE,
    faulty.REPORTED_TRUNCATED: Fault.TRUNCATION,
    faulty.TOP_P_FORGOTTEN: Fault.TRUNCATION,
    faulty.ADAPTER_SCALE: Fault.ADAPTER_SCALE,
}
HARD_PROBLEMS = ("5*5*5=", "987*123=", "6*7*8=", "9*9*9=")
"""The model is unsure of these answers, so top-p changes their probabilities by more than the limit."""


def hard_prompts() -> BatchedDataDict:
    tokenizer = embedded_tokenizer()
    rows = [torch.tensor(render_prompt(tokenizer, [{"role": "user", "content": text}])) for text in HARD_PROBLEMS]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


class GuardedSteps:
    """A policy and a generator with faults; `step` makes a refit and the rows of a training step."""

    def __init__(self, policy: Policy, generator: SeparateGenerator, config: PolicyConfig, folder: str, caplog) -> None:
        self.policy, self.generator, self._folder, self._caplog = policy, generator, folder, caplog
        self.guard = StepGuard(policy, config, generator.guard)
        self.version = 0

    def step(self, fault: str = "", *, is_repeated: bool = False, **where: int) -> list[str]:
        """Change the weights, refit, sample and check; return what was found.

        Args:
            is_repeated: the guard remembers its last warning.
            where: passed on to `inject` of the generators.
        """
        for worker in self.generator.pool.workers:
            worker.run("inject", fault, *where.values())
        self._caplog.clear()
        if not is_repeated:
            self.guard._last = None
        self.version += 1
        self.policy.group.run_all("_add_noise_to_weights")
        try:
            self.generator.update_weights(self.version)
            warning = self.guard.check(self.version, self.rows())
        except LucidError as error:
            return [str(error)]
        found = [record.message for record in self._caplog.records]
        return found + ([warning.message] if warning is not None else [])

    def restore_weights(self) -> None:
        """Give the policy the weights that it started with."""
        self.policy.group.run_all("load_checkpoint", self._folder)

    def rows(self) -> BatchedDataDict:
        data = hard_prompts().select_indices(torch.arange(32) % len(HARD_PROBLEMS))
        output = self.generator.generate(data)
        position = torch.arange(output["output_ids"].shape[1])
        ends, counts = output["unpadded_sequence_lengths"][:, None], output["generation_lengths"][:, None]
        return BatchedDataDict(
            {
                "input_ids": output["output_ids"],
                "input_lengths": output["unpadded_sequence_lengths"],
                "token_mask": ((position >= ends - counts) & (position < ends)).float(),
                "sample_mask": torch.ones(32),
                "generation_logprobs": output["logprobs"],
            }
        )


@pytest.fixture
def guarded(monkeypatch, caplog, tmp_path):
    """Return a function of precision and sampling settings that starts a policy and a generator with faults."""
    monkeypatch.setitem(separate.ENGINES, "builtin", faulty.FaultyGenerator)
    caplog.set_level(logging.WARNING)
    opened = []

    def start(precision: str = "float32", lora: dict | None = None, **sampling: float) -> GuardedSteps:
        torch.manual_seed(0)
        generation = {"placement": "separate", "max_new_tokens": 8, **sampling}
        config = PolicyConfig(model_name="embedded", precision=precision, lora=lora, generation=generation)
        tokenizer = embedded_tokenizer()
        policy = Policy(config, tokenizer, init_optimizer=False, init_reference_model=False)
        opened.append(policy)
        generator = SeparateGenerator(policy, config, tokenizer)
        opened.append(generator)
        generator.update_weights(0)
        policy.group.run_all("save_checkpoint", str(tmp_path))
        return GuardedSteps(policy, generator, config, str(tmp_path), caplog)

    yield start
    for part in reversed(opened):
        part.shutdown()


@pytest.mark.slow
def test_each_fault_is_found_and_named_in_the_step_in_which_it_starts(guarded):
    steps = guarded(temperature=0.7, top_p=0.8)
    for _ in range(10):
        steps.restore_weights()
        for fault in faulty.FAULTS:
            check_fault(steps, fault)


@pytest.mark.slow
def test_a_wrong_scale_of_an_adapter_is_found_and_named_in_the_step_in_which_it_starts(guarded):
    steps = guarded(temperature=0.7, top_p=0.8, lora={"rank": 4, "alpha": 16.0})
    for _ in range(10):
        check_fault(steps, faulty.ADAPTER_SCALE)


def check_fault(steps: GuardedSteps, fault: str) -> None:
    assert steps.step() == [], f"false alarm before {fault}"
    found = steps.step(fault)
    assert len(found) >= 1, f"{fault} was not found"
    assert all(f": {NAMES[fault]} (" in message for message in found), (fault, found)


@pytest.mark.slow
def test_the_same_fault_is_reported_once_and_another_one_at_once(guarded):
    steps = guarded(temperature=0.7, top_p=0.8)
    assert steps.step() == []
    assert len(steps.step(faulty.REPORTED_TRUNCATED)) == 1
    assert steps.step(faulty.REPORTED_TRUNCATED, is_repeated=True) == []
    [message] = steps.step(faulty.TEMPERATURE, is_repeated=True)
    assert ": temperature (" in message


@pytest.mark.slow
def test_a_skipped_refit_and_a_permuted_tensor_stop_the_run_and_clean_refits_do_not(guarded):
    steps = guarded()
    assert steps.step() == []
    [stale] = steps.step(faulty.SKIPPED)
    assert "generator 0 after the refit to version 2: stale version" in stale
    [wrong] = steps.step(faulty.PERMUTED)
    assert "wrong or permuted tensor (mean absolute difference" in wrong
    assert faulty.VICTIM in wrong
    assert steps.step() == []
    assert steps.generator.policy_version == 4


@pytest.mark.slow
def test_twenty_clean_steps_in_bfloat16_are_silent(guarded):
    steps = guarded("bfloat16", temperature=0.7, top_p=0.8)
    assert [steps.step() for _ in range(20)] == [[]] * 20


def test_the_probe_has_known_tokens_of_any_tokenizer():
    tokenizer = embedded_tokenizer()
    tokens = probe_tokens(tokenizer)
    assert len(tokens) >= 12
    assert tokenizer.unk_token_id not in tokens


@pytest.mark.parametrize(
    ("probe_difference", "of_refit", "named"),
    [
        (2.0, Fault.MISSING_TENSOR, Fault.MISSING_TENSOR),
        (0.001, Fault.MISSING_TENSOR, Fault.TEMPERATURE),
        (2.0, Fault.PRECISION, Fault.TEMPERATURE),
    ],
)
def test_a_fault_of_the_probe_explains_rows_that_differ_about_as_much(probe_difference, of_refit, named):
    """The temperature explains the few tokens of the rows, right or by chance."""
    config = PolicyConfig(model_name="embedded", generation={"temperature": 0.7})
    rows = hard_prompts()
    is_token = torch.arange(rows["input_ids"].shape[1]) < rows["input_lengths"][:, None]
    is_token[:, 0] = False
    rows["token_mask"], rows["sample_mask"] = is_token.float(), torch.ones(rows.size)
    refit_guard = SimpleNamespace(diagnosis=Diagnosis(of_refit, "of the probe", False), difference=probe_difference)
    with Policy(config, embedded_tokenizer(), init_optimizer=False, init_reference_model=False) as policy:
        guard = StepGuard(policy, config, refit_guard)
        arguments = (rows["input_ids"], rows["input_lengths"], is_token, [Sampling(1.0)], Sampling(0.7), 0.0)
        [lost], _ = policy.group.run_all("scorer.explanations", *arguments)[0]
        rows["generation_logprobs"] = torch.zeros(is_token.shape).masked_scatter(is_token, lost)
        evidence = guard.evidence(rows)
        assert 2.0 < evidence.difference < 8.0
        assert guard.diagnosis(evidence, rows).fault is named
