"""A step on preferences does not depend on micro-batches, packing, shared prompts or ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.process_group import Layout, RankMesh
from lucidrl.errors import DataError
from lucidrl.losses.config import PreferenceConfig
from lucidrl.losses.preference import PreferenceLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.row_plans import RowPlans
from tests.float64 import float64_throughout
from tests.tiers import slow_except
from tests.unit.models.policy.test_distillation_ranks import CUTS, assert_equal
from tests.unit.models.policy.test_ranks import FIXED, SGD, gathered_weights, own_rows

LAYOUTS = {"dp2": {}, "tp2": {"tensor_parallel_size": 2}, "cp2": {"context_parallel_size": 2}}
PROMPT = 20
BUDGETS = {"train_mb_tokens": 90, "logprob_mb_tokens": 90}


def cut(name: str) -> dict[str, Any]:
    options = CUTS[name]
    key = "dynamic_batching" if name == "dynamic" else "sequence_packing"
    enabled = {"enabled": True} if name == "dynamic" else {}
    return options if name.startswith("rows") else {**options, key: {**BUDGETS, **enabled}}


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([39, 27, 32, 36, 25, 38, 31, 29])
    is_token = torch.arange(39) < lengths[:, None]
    ids = torch.randint(2, 90, (8, 39), generator=generator)
    ids[1::2, :PROMPT] = ids[::2, :PROMPT]  # both rows of a pair share their prompt
    return {
        "input_ids": ids * is_token,
        "input_lengths": lengths,
        "token_mask": (is_token & (torch.arange(39) >= PROMPT)).long(),
        "sample_mask": torch.ones(8),
        "preference": torch.tensor([1.0, -1, 1, -1, -1, 1, 1, -1]),
        "pair_ids": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
        "reference_logprob_sums": -60 - 20 * torch.rand(8, generator=generator, dtype=torch.float64),
        "kl_baseline": torch.full((8,), 0.3, dtype=torch.float64),
        "idx": [f"row {number}" for number in range(8)],
    }


def two_steps(options: dict[str, Any], loss: str, rows: dict[str, Any]) -> dict[str, Any]:
    config = PolicyConfig(**{"model_name": "embedded", "precision": "float64", **SGD, **options})
    worker = DTensorPolicyWorker(config, embedded_tokenizer(), seed=1)
    loss_fn, own = PreferenceLoss(PreferenceConfig(loss=loss, beta=0.05)), own_rows(worker, rows)
    # Rows that share tokens are computed otherwise, equal in exact arithmetic. Ranks keep position tables in float32.
    with float64_throughout() if config.share_prefixes else nullcontext():
        results = [worker.train(own, loss_fn) for _ in range(2)]
    counted = ("row_tokens", "computed_tokens")
    return {
        "losses": torch.cat([result["global_loss"] for result in results]),
        "grad_norms": torch.stack([result["grad_norm"] for result in results]),
        "metrics": {name: value for name, value in results[-1]["metrics"].items() if name not in counted},
        "computed": results[-1]["metrics"]["computed_tokens"],
        "weights": gathered_weights(worker),
    }


@pytest.fixture(scope="module")
def whole(rows):
    """Return a cached function: the step in one micro-batch, on one rank."""

    @cache
    def run(loss: str, shares: bool = True) -> dict[str, Any]:
        return two_steps({**FIXED, "train_micro_batch_size": 8, "share_prefixes": shares}, loss, rows)

    return run


@pytest.mark.parametrize("name", slow_except(CUTS, "rows_of_1", "packed"))
@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto"])
def test_cuts_of_rows_train_alike(rows, whole, name, loss):
    found = two_steps(cut(name), loss, rows)
    assert_equal(found, whole(loss, CUTS[name].get("share_prefixes", True)))
    assert found["losses"].isfinite().all()
    assert found["losses"][0] != found["losses"][1]


def test_a_pair_computes_its_prompt_once(rows):
    shared, alone = (two_steps({**cut("packed"), "share_prefixes": shares}, "dpo", rows) for shares in (True, False))
    assert alone["computed"] - shared["computed"] == 4 * PROMPT


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "dp2"))
@pytest.mark.parametrize("loss", slow_except(["dpo", "ipo", "kto"], "dpo"))
def test_two_ranks_train_as_one(two_ranks, rows, whole, layout, loss):
    options = {**FIXED, "share_prefixes": False, "dtensor_cfg": LAYOUTS[layout]}
    for found in two_ranks(two_steps, options, loss, rows):
        assert_equal(found, whole(loss, shares=False))


def test_a_pair_over_the_budget_is_named(rows):
    options = {"sequence_packing": {"train_mb_tokens": 30, "logprob_mb_tokens": 90}}
    with pytest.raises(DataError, match=r"pair 0 has 46 tokens, more than the budget of 30 .* at least 48"):
        two_steps(options, "dpo", rows)


def test_both_rows_of_a_pair_are_in_one_micro_batch(rows):
    mesh = RankMesh(Layout.of_world(1, 1, 1), torch.device("cpu"))
    for name in CUTS:
        plans = RowPlans(PolicyConfig(model_name="embedded", **cut(name)), mesh)
        groups = plans.for_training(BatchedDataDict(rows), None).groups
        assert sorted(row for group in groups for row in group) == list(range(8))
        assert all({row ^ 1 for row in group} == set(group) for group in groups), (name, groups)
