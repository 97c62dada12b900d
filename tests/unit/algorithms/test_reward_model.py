"""Reward models: what they learn, that transformers loads them, and that GRPO learns from them."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lucidrl.algorithms.reward_model import Calibration
from lucidrl.data.datasets import Prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.envs.text.interfaces import EnvRequest
from lucidrl.errors import ConfigError
from lucidrl.losses.preference import BradleyTerryLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.loading import load_model
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.policy import Policy
from lucidrl.models.reward_model import scored_tokens
from lucidrl.rewards.env import RewardEnv
from tests.tiers import slow_except
from tests.unit.models.policy.test_distillation_ranks import CUTS, assert_equal
from tests.unit.models.policy.test_ranks import FIXED, SGD, gathered_weights, own_rows

PAD = 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a reward model that prefers sums which end with an even digit."""
    from lucidrl.recipes.run import train
    from lucidrl.recipes.settings import new_settings
    from tests.unit.algorithms.conftest import RunFolder, Watcher

    root = tmp_path_factory.mktemp("reward_model")
    path, folder = root / "pairs.jsonl", root / "run"
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b - (a + b) % 2), "rejected": str(a + b - (a + b) % 2 + 1)}
        for a in range(10, 50)
        for b in range(10, 20)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    folder.mkdir()
    settings = [f"data.file={path}", "lr=1e-3", "reward_model.max_steps=25", "validation.every=0"]
    config = new_settings(
        "reward-model",
        overrides=[*settings, "policy.model_name=embedded", "tracking.tensorboard=false", "policy.precision=float32"],
    )
    (folder / "config.yaml").write_text(config.to_yaml())
    train(config, folder, Watcher())
    return RunFolder(folder, Watcher())


def weights_of(run) -> str:
    [folder] = sorted(run.path.glob("checkpoints/step_25/policy"))
    return str(folder)


def token_rows() -> dict[str, torch.Tensor]:
    ids = torch.randint(6, 90, (6, 30), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([30, 21, 27, 22, 29, 25])
    ids[1::2, :20] = ids[::2, :20]
    ids[3, 21] = PAD  # a row that ends with the padding token
    return {
        "input_ids": ids.masked_fill(torch.arange(30) >= lengths[:, None], PAD),
        "input_lengths": lengths,
        "token_mask": scored_tokens(ids, lengths, PAD).float(),
        "sample_mask": torch.ones(6),
        "preference": torch.tensor([1.0, -1] * 3),
        "pair_ids": torch.tensor([0, 0, 1, 1, 2, 2]),
    }


@pytest.mark.slow
def test_it_separates_separable_pairs_and_reports_its_calibration(trained):
    found = [line for line in trained.lines() if "validation/accuracy" in line]
    assert found[0]["validation/accuracy"] < 0.8
    assert found[-1]["validation/accuracy"] > 0.9
    assert found[-1]["validation/loss"] < 0.3
    assert 0 <= found[-1]["validation/calibration_error"] < 0.3
    assert list((trained.path / "plots").rglob("*.png")), "the calibration is plotted"


def test_transformers_loads_it_with_equal_scores(trained):
    theirs = AutoModelForSequenceClassification.from_pretrained(weights_of(trained)).eval()
    rows = token_rows()
    is_token = torch.arange(30) < rows["input_lengths"][:, None]
    with torch.no_grad():
        expected = theirs(input_ids=rows["input_ids"], attention_mask=is_token.long()).logits[:, 0]
    tokenizer = embedded_tokenizer()
    for options in ({}, {"sequence_packing": {"enabled": False}, "logprob_batch_size": 2}, {"share_prefixes": False}):
        config = PolicyConfig(model_name=weights_of(trained), **options)
        with Policy(config, tokenizer, init_optimizer=False, init_reference_model=False, role="reward") as policy:
            torch.testing.assert_close(policy.values(BatchedDataDict(rows)), expected, rtol=1e-4, atol=1e-5)


def test_a_row_is_scored_at_its_last_token_other_than_padding():
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, PAD], [5, 6, PAD, 7]])
    assert scored_tokens(ids, torch.tensor([4, 4, 3]), PAD).tolist() == [[0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0]]


def two_steps(kind: type, options: dict, rows: dict) -> dict:
    config = PolicyConfig(**{"model_name": "embedded", "precision": "float64", **SGD, **options})
    worker = kind(config, embedded_tokenizer(), seed=1, role="reward", init_reference_model=False)
    results = [worker.train(own_rows(worker, rows), BradleyTerryLoss()) for _ in range(2)]
    return {
        "losses": torch.cat([result["global_loss"] for result in results]),
        "grad_norms": torch.stack([result["grad_norm"] for result in results]),
        "metrics": {"accuracy": results[-1]["metrics"]["accuracy"]},
        "weights": gathered_weights(worker),
    }


@pytest.mark.parametrize("cut", slow_except([cut for cut in CUTS if cut != "dynamic"], "rows_of_8"))
def test_cuts_of_rows_train_alike(cut):
    options = {**CUTS[cut], "sequence_packing": {"train_mb_tokens": 70}} if not cut.startswith("rows") else CUTS[cut]
    options = {**options, "share_prefixes": False}
    whole = two_steps(DTensorPolicyWorker, {**FIXED, "share_prefixes": False}, token_rows())
    assert_equal(two_steps(DTensorPolicyWorker, options, token_rows()), whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DTensorPolicyWorker, FSDP1PolicyWorker])
def test_two_ranks_train_as_one(two_ranks, kind):
    rows = {name: torch.cat([column, column[:2]]) for name, column in token_rows().items()}
    rows["pair_ids"][-2:] = 3
    whole = two_steps(DTensorPolicyWorker, {**FIXED, "share_prefixes": False}, rows)
    for found in two_ranks(two_steps, kind, {**FIXED, "share_prefixes": False}, rows):
        assert_equal(found, whole)


def test_the_calibration_error_is_that_of_its_definition():
    margins = torch.tensor([0.1, -0.1, 0.05, 3.0, 3.0, 3.0, -3.0])
    sure, unsure = 1 / (1 + math.exp(-3)), [1 / (1 + math.exp(-margin)) for margin in (0.1, 0.1, 0.05)]
    expected = (3 * abs(2 / 3 - sum(unsure) / 3) + 4 * abs(3 / 4 - sure)) / 7
    calibration = Calibration.of(margins)
    assert calibration.counts_K.tolist() == [3, 0, 0, 0, 0, 0, 0, 0, 0, 4]
    assert calibration.expected_error == pytest.approx(expected, abs=1e-6)
    perfect = Calibration.of(torch.tensor([1.0] * 731 + [-1.0] * 269))  # sigmoid(1) = 0.731
    assert perfect.expected_error < 1e-3


@pytest.mark.slow
def test_a_reward_model_is_refused_as_a_language_model(trained):
    with pytest.raises(ConfigError, match="is a reward model, which scores rows and has no head for tokens"):
        load_model(weights_of(trained), torch.float32)


@pytest.mark.slow
def test_the_reward_is_the_score_of_the_model(trained):
    import asyncio

    env = RewardEnv(f"model:{trained.path}")
    try:
        prompt = Prompt("p", ({"role": "user", "content": "12+13="},), {})
        env.check_prompt(prompt)

        def request(completion: str) -> EnvRequest:
            log = [*map(dict, prompt.messages), {"role": "assistant", "content": completion, "token_ids": "not read"}]
            return EnvRequest("p", log, {}, 1)

        even, odd, long = asyncio.run(env.step([request("24"), request("25"), request("2" * 600)]))
    finally:
        env.close()
    assert even.reward > odd.reward + 0.5
    assert even.components["model"].score == even.reward
    assert long.is_dropped
    assert long.metrics["reward/model/crash"] == 1


@pytest.mark.slow
def test_grpo_with_a_reward_model_raises_the_true_reward(run, trained, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{a}+{b}="}) for a in range(10, 50) for b in range(20, 30)))
    true = "tests.unit.algorithms.test_reward_model:ends_with_an_even_digit"
    rewards = f"[{{name: 'model:{trained.path}'}}, {{name: '{true}', weight: 0}}]"
    settings = (f"data.file={path}", f"reward={rewards}", "env={}", "policy.model_name=embedded", "grpo.max_steps=12")
    samples = ("collector.prompts_per_step=16", "collector.samples_per_prompt=8", "validation.num_prompts=0", "lr=3e-4")
    folder, _ = run("grpo", "grpo", *settings, *samples, "grpo.loss.entropy_coefficient=0", "checkpoint.metric=null")
    truth = folder.train_metric("reward/ends_with_an_even_digit")
    assert sum(truth[:2]) / 2 < 0.7, truth
    assert sum(truth[-2:]) / 2 > 0.85, truth


def ends_with_an_even_digit(completion: str) -> float:
    return float(completion[-1:] in tuple("02468"))


@pytest.mark.slow
def test_bad_folders_are_refused_in_one_sentence(trained, embedded_folder, tmp_path):
    with pytest.raises(ConfigError, match="has no score head, so it cannot score completions; train a reward model"):
        RewardEnv(f"model:{embedded_folder}")
    with pytest.raises(ConfigError, match=r"reward=.*nowhere.* does not exist"):
        RewardEnv(f"model:{tmp_path / 'nowhere'}")
    with pytest.raises(ConfigError, match="num_workers=2 would have no effect"):
        RewardEnv({"name": f"model:{trained.path}", "num_workers": 2})
    two_labels = tmp_path / "labels"
    shutil.copytree(weights_of(trained), two_labels)
    config = json.loads((two_labels / "config.json").read_text())
    config["id2label"], config["label2id"] = {"0": "a", "1": "b"}, {"a": 0, "b": 1}
    (two_labels / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has 2 labels, but a reward model has one score"):
        Policy(PolicyConfig(model_name=str(two_labels)), embedded_tokenizer(), role="reward")
