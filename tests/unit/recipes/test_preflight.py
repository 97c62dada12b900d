"""The check before a run: it finds what would stop the run, without loading weights."""

from __future__ import annotations

import re

import orjson
import pytest
from rich.console import Console
from transformers import GPT2Config

from lucidrl.data.stream import Dataset
from lucidrl.errors import ConfigError, DataError
from lucidrl.models.embedded import embedded_config, embedded_tokenizer
from lucidrl.models.loading import load_model
from lucidrl.recipes.configs import GRPORunConfig, SFTRunConfig
from lucidrl.recipes.preflight import preflight
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from tests.unit.algorithms.conftest import Watcher


@pytest.fixture
def model_without_weights(tmp_path):
    folder = tmp_path / "model"
    embedded_config().save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    return folder


def settings(tmp_path, *overrides, schema=GRPORunConfig):
    small = {"run": {"root": str(tmp_path / "runs")}, "env": {"name": "arithmetic", "kwargs": {"max_operand": 9}}}
    return load_config(schema, small, overrides=overrides)


def write_rows(path, rows):
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return path


@pytest.mark.parametrize("schema", [GRPORunConfig, SFTRunConfig])
def test_a_model_without_weights_passes_the_check(tmp_path, model_without_weights, schema):
    found = preflight(settings(tmp_path, f"policy.model_name={model_without_weights}", schema=schema))
    assert found.facts.architecture == "LlamaForCausalLM"
    assert found.data.num_train + found.data.num_held_out == 10 * 10
    assert sum(found.memory_gib.values()) > 0
    assert not (tmp_path / "runs").exists()


def test_the_facts_are_those_of_the_loaded_model(tmp_path):
    facts = preflight(settings(tmp_path)).facts
    model = load_model("embedded", dtype=None)
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_memory_estimate_grows_with_the_settings(tmp_path):
    plain = preflight(settings(tmp_path)).memory_gib
    more = preflight(settings(tmp_path, "grpo.loss.kl_coefficient=0.1", "collector.samples_per_prompt=16")).memory_gib
    assert more["reference weights"] == plain["weights"]
    assert more["key-value cache"] > plain["key-value cache"]


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_size_of_a_checkpoint_is_that_of_its_files(tmp_path, precision, weights_only):
    small = ["sft.max_steps=1", "sft.examples_per_step=2", "validation.num_prompts=0", "checkpoint.metric=null"]
    small += [f"policy.precision={precision}", f"checkpoint.weights_only={weights_only}", "tracking.tensorboard=false"]
    config = settings(tmp_path, *small, schema=SFTRunConfig)
    said = preflight(config).checkpoint
    train(config, tmp_path, Watcher())
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoints/step_1").rglob("*.safetensors"))
    assert float(said.partition(" MiB")[0]) == pytest.approx(written / 2**20, rel=0.05)
    assert ("weights only" if weights_only else "weights and optimizer") in said
    assert "at most 2 kept" in said


def test_an_architecture_without_a_tensor_parallel_plan_is_found_before_the_ranks_start(tmp_path):
    folder = tmp_path / "model"
    GPT2Config(vocab_size=100, n_positions=512, n_embd=16, n_layer=1, n_head=2).save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    overrides = ["cluster.num_workers=2", "policy.dtensor_cfg.tensor_parallel_size=2", f"policy.model_name={folder}"]
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no plan for tensor parallelism"):
        preflight(settings(tmp_path, *overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["cluster.num_nodes=2", "cluster.num_workers=2"],
            r"cluster\.num_nodes=2 needs a Ray cluster, but .* one node",
        ),
        (
            ["policy.generation.placement=separate", "policy.generation.nodes=other"],
            r"policy\.generation\.nodes=other needs nodes beside .* has one node; set cluster\.address",
        ),
    ],
)
def test_a_ray_that_is_started_for_the_run_is_one_node(tmp_path, overrides, said):
    with pytest.raises(ConfigError, match=said):
        preflight(settings(tmp_path, "cluster.launcher=ray", *overrides))


@pytest.mark.parametrize(("refit", "copies"), [("ipc", 2), ("collective", 6)])
def test_separate_generators_hold_two_versions_together_or_each(tmp_path, refit, copies):
    separate = ["policy.generation.placement=separate", "policy.generation.num_workers=3"]
    memory = preflight(settings(tmp_path, *separate, f"policy.generation.refit={refit}")).memory_gib
    assert memory["generators"] == copies * memory["weights"]


def test_a_prompt_that_leaves_no_room_for_a_completion_is_named(tmp_path):
    rows = [{"id": f"p{n}", "prompt": "1+1="} for n in range(20)]
    file = write_rows(tmp_path / "prompts.jsonl", [*rows, {"id": "tale", "prompt": "x" * 510}])
    with pytest.raises(
        DataError,
        match=r"'tale' \(.*prompts\.jsonl:21\) has 512 .*data\.max_prompt_tokens=511",
    ):
        preflight(settings(tmp_path, f"data.file={file}"))


def test_the_environment_is_made_even_if_a_file_has_the_prompts(tmp_path):
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "1+2="}])
    with pytest.raises(ConfigError, match="no_such_module"):
        preflight(settings(tmp_path, f"data.file={file}", "env.name=no_such_module:Env"))


def test_a_file_replaces_the_prompts_of_the_environment(tmp_path):
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "1+2="}, {"prompt": "30+12="}])
    found = preflight(settings(tmp_path, f"data.file={file}", "data.validation_fraction=0"))
    assert (found.data.num_rows, found.data.num_train, found.data.longest) == (2, 2, 8)


def test_a_large_file_is_checked_by_evenly_spread_rows(tmp_path, monkeypatch):
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{n}+2="} for n in range(300)])
    monkeypatch.setattr(Dataset.survey, "__defaults__", (100,))
    found = preflight(settings(tmp_path, f"data.file={file}"))
    console = Console(width=120, record=True)
    console.print(found.table())
    text = console.export_text()
    assert "100 of 300 rows, evenly spread" in text
    assert re.search(r"training +about 2\d\d prompts", text)


def test_an_example_longer_than_the_context_is_shown_by_its_beginning(tmp_path):
    rows = [{"prompt": f"{n}", "completion": "1"} for n in range(20)]
    file = write_rows(tmp_path / "talk.jsonl", [*rows, {"prompt": "once " * 200, "completion": "end"}])
    with pytest.raises(DataError, match=r"example 'once once.* has 1006 tokens.*context of 512 tokens"):
        preflight(settings(tmp_path, f"data.file={file}", schema=SFTRunConfig))


def test_an_example_that_cannot_be_rendered_is_named_with_its_row(tmp_path):
    turns = [{"from": "gpt", "value": "hello"}]
    file = write_rows(tmp_path / "talk.jsonl", [{"prompt": "1", "completion": "1"}, {"conversations": turns}])
    with pytest.raises(DataError, match=r"'hello' \(.*talk\.jsonl:2\): there are no messages to complete"):
        preflight(settings(tmp_path, f"data.file={file}", "data.validation_fraction=0", schema=SFTRunConfig))


def test_a_run_name_that_is_taken_is_refused(tmp_path):
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").write_text("")
    with pytest.raises(ConfigError, match="holds a run already"):
        preflight(settings(tmp_path, "run.name=mine"))


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("[]", "has no prompts"),
        ("[Prompt('a', ()), Prompt('b', ()), Prompt('a', ())]", "has 2 prompts with the id 'a'"),
    ],
)
def test_an_environment_must_have_prompts_of_different_ids(tmp_path, monkeypatch, prompts, said):
    name = f"prompting_{len(prompts)}"
    (tmp_path / f"{name}.py").write_text(
        "from lucidrl.data.datasets import Prompt\n"
        "class Env:\n"
        "    async def step(self, batch): ...\n"
        f"    def prompts(self): return {prompts}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=said):
        preflight(settings(tmp_path, f"env.name={name}:Env", "data.validation_fraction=0"))


def test_a_token_budget_below_the_longest_possible_row_is_refused():
    config = GRPORunConfig.model_validate({"policy": {"sequence_packing": {"train_mb_tokens": 20}}})
    with pytest.raises(ConfigError, match=r"policy\.sequence_packing\.train_mb_tokens=20 is less than the longest"):
        preflight(config)
