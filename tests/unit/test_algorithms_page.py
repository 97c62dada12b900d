"""docs/algorithms.md: its tables are those of code and records, and its worked example is what the code computes."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lucidrl.algorithms.config import GRPOConfig
from lucidrl.algorithms.credit import kept_samples, token_advantages
from lucidrl.algorithms.variants import Variant
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.interfaces import TokenOutputs, valid_row_mask, valid_token_mask
from lucidrl.losses.policy_gradient import ClippedPGLoss

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
MAX_NEW_TOKENS = 4


@pytest.fixture(scope="module")
def curves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT / "tools")])
        yield importlib.import_module("variant_curves")


def test_the_tables_are_those_of_the_settings_and_the_records(curves):
    assert curves.page_with_tables(TEXT, curves.records()) == TEXT, "run `python tools/variant_curves.py draw`"


def test_every_variant_has_a_recorded_curve_with_its_name(curves):
    assert list(curves.records()) == list(Variant)
    image = (ROOT / "docs" / "images" / "variants.svg").read_text(encoding="utf-8")
    assert [variant for variant in Variant if f">{variant}<" not in image] == []
    assert "(images/variants.svg)" in TEXT


def test_every_recorded_run_learned(curves):
    for variant, content in curves.records().items():
        rewards = [reward for _, reward in content["training"]]
        assert content["steps"] == len(rewards) == 200
        assert sum(rewards[-20:]) > sum(rewards[:20]) + 2, variant


def test_the_script_records_a_run_and_draws_it(curves, tmp_path, monkeypatch):
    lines = [{"step": 0, "validation/accuracy": 0.12345}]
    lines += [{"step": step, "train/reward": step / 10, "time/step_s": 1.0} for step in (1, 2)]
    (tmp_path / "config.yaml").write_text("grpo: {variant: gspo}")
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(curves, "RECORDS", tmp_path / "records")
    curves.record(Variant.GSPO, tmp_path)
    found = curves.records()
    assert found[Variant.GSPO]["training"] == [[1, 0.1], [2, 0.2]]
    assert curves.results_table(found).endswith("| `gspo` | 0.150 | 0.150 | 0.123 | 0.123 |")
    curves.draw(found, tmp_path / "variants.svg")
    assert ">gspo<" in (tmp_path / "variants.svg").read_text()


# The worked example


def example() -> tuple[torch.Tensor, BatchedDataDict, SimpleNamespace]:
    """Probabilities of the page's table, behind one prompt token."""
    probabilities = {
        "logprobs": [[0.6, 0.5], [0.2, 1.0]],
        "prev_logprobs": [[0.4, 0.5], [0.4, 1.0]],
        "reference_policy_logprobs": [[0.3, 0.5], [0.4, 1.0]],
    }
    columns = {
        name: torch.nn.functional.pad(torch.tensor(values, dtype=torch.float64).log(), (1, 0))
        for name, values in probabilities.items()
    }
    batch = BatchedDataDict(
        {
            **columns,
            "token_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
            "sample_mask": torch.ones(2, dtype=torch.float64),
        }
    )
    rollouts = SimpleNamespace(
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        is_valid=torch.tensor([True, True]),
        is_truncated=torch.tensor([False, False]),
        components={},
        samples=[SimpleNamespace(name="p#0"), SimpleNamespace(name="p#1")],
    )
    return batch.pop("logprobs"), batch, rollouts


@pytest.mark.parametrize("variant", Variant)
def test_the_worked_example_is_what_the_code_computes(variant):
    [row] = re.findall(rf"^\| `{variant}` \| .* \| (-?[\d.]+) \|$", TEXT, flags=re.MULTILINE)[:1]
    config = GRPOConfig(variant=variant).with_constant_length(MAX_NEW_TOKENS)
    logprobs, batch, rollouts = example()
    kept = batch["sample_mask"] * kept_samples(config, rollouts)
    batch["advantages"] = token_advantages(config.advantages, rollouts, batch, torch.arange(2), kept).double()
    counts = valid_row_mask(batch).sum(), valid_token_mask(batch).sum()
    loss, _ = ClippedPGLoss(config.loss)(TokenOutputs(logprobs=logprobs), batch, *counts)
    digits = len(row.partition(".")[2])
    assert loss.item() == pytest.approx(float(row), abs=0.6 * 10**-digits)


def test_the_intermediate_numbers_of_the_example_are_right():
    kl = math.log(0.4 / 0.3)
    shaped = [0.5 - 0.01 * kl, 0.5, -0.5]
    mean = sum(shaped) / 3
    std = math.sqrt(sum((value - mean) ** 2 for value in shaped) / 3)
    numbers = [
        math.log(2) - 0.5,
        1 - math.log(2),
        1 - 0.05 * kl,
        mean,
        std,
        *((value - mean) / std for value in shaped),
    ]
    assert [f"{abs(number):.4f}" for number in numbers if f"{abs(number):.4f}" not in TEXT] == []
