"""Settings of the data: forms of `data.file`, the template, and old names."""

from __future__ import annotations

from pathlib import Path

import pytest

from lucidrl.data.config import DataConfig
from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import GRPORunConfig, SFTRunConfig
from lucidrl.utils.config import dump_yaml, load_config


def files(*overrides):
    return [(entry.file, entry.weight) for entry in load_config(GRPORunConfig, overrides=overrides).data.files]


def test_one_file_or_several_with_weights():
    assert files("data.file=a.jsonl") == [("a.jsonl", 1.0)]
    assert files("data.file=[{file: a.jsonl, weight: 2}, b.csv]") == [("a.jsonl", 2.0), ("b.csv", 1.0)]
    assert files() == []
    assert [entry.file for entry in DataConfig(file=Path("x/a.jsonl")).files] == ["x/a.jsonl"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.file=[]", "the list of files is empty"),
        ("data.file=[{file: a.jsonl, weight: 0}]", "greater than 0"),
        ("data.file=[{fil: a.jsonl}]", "fil"),
        ("data.template='{% for %}'", r"data\.template: line 1 is not valid jinja"),
        ("data.limit=0", "greater than 0"),
        ("data={file: [a.jsonl, b.jsonl], limit: 1}", r"data: limit=1 is less than one row for each of the 2 files"),
        ("data.validation_fraction=1", "less than 1"),
        ("data.validation_file=a.jsonl", r"needs training rows too; set data\.file"),
        ("data.promt=question", r"did you mean data\.prompt\?"),
    ],
)
def test_a_wrong_setting_is_one_sentence(override, said):
    with pytest.raises(ConfigError, match=said):
        load_config(GRPORunConfig, overrides=[override])


@pytest.mark.parametrize("template", ["{{ q }}", "Question: {{ q }}\nIt's #1", "{% if q %}{{ q }}{% endif %}"])
def test_a_template_is_written_on_the_command_line_without_quotes(template):
    config = load_config(GRPORunConfig, overrides=["data.file=a.jsonl", f"data.template={template}"])
    assert config.data.template == template


@pytest.mark.parametrize("schema", [GRPORunConfig, SFTRunConfig])
@pytest.mark.parametrize(
    "setting", ["prompt=q", "template=x", "system_prompt=Add.", "max_prompt_tokens=9", "where={level: 3}"]
)
def test_settings_of_rows_are_refused_if_the_environment_has_the_prompts(schema, setting):
    with pytest.raises(ConfigError, match=rf"data\.{setting.partition('=')[0]}=.* would have no effect.*arithmetic"):
        load_config(schema, overrides=[f"data.{setting}"])
    load_config(schema, overrides=[f"data.{setting}", "data.file=a.jsonl"])
    load_config(schema, overrides=[f"data.{setting}", "python_inputs={dataset: 3 rows}"])


@pytest.mark.parametrize(
    ("schema", "overrides", "said"),
    [
        (GRPORunConfig, ["data.answer=a"], r"data\.answer=a would have no effect.*; set data\.file"),
        (SFTRunConfig, ["data.completion=c"], r"data\.completion=c would have no effect.*; set data\.file"),
        (GRPORunConfig, ["data.file=a.csv", "data.completion=c"], "because the policy samples its completions"),
        (SFTRunConfig, ["data.file=a.csv", "data.answer=c"], r"name the column to learn with data\.completion"),
        (
            SFTRunConfig,
            ["data.file=a.csv", "reward=[math, my:f]"],
            "reward=math, my:f would have no effect.*lucidrl grpo",
        ),
        (SFTRunConfig, ["data={file: a.csv, prompt: q, template: x}"], "prompt=q would have no effect.*template"),
    ],
)
def test_a_setting_that_the_algorithm_does_not_read_is_refused(schema, overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config(schema, overrides=overrides)


def test_rows_of_a_program_may_have_a_validation_file():
    overrides = ["python_inputs={dataset: 3 rows}", "data.validation_file=a.jsonl"]
    assert load_config(GRPORunConfig, overrides=overrides).data.validation_file == "a.jsonl"


def test_written_settings_are_read_back(tmp_path):
    settings = [
        "data.file=[{file: a.jsonl, weight: 2}, b.csv]",
        "data.where={level: [1, 2], source: x}",
        "data.limit=5",
    ]
    config = load_config(SFTRunConfig, overrides=settings)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(SFTRunConfig, tmp_path / "config.yaml") == config


def test_old_names_are_read_with_a_warning(caplog):
    config = load_config(GRPORunConfig, overrides=["env.prompts_file=a.jsonl", "env.validation_fraction=0.2"])
    assert (config.data.file, config.data.validation_fraction) == ("a.jsonl", 0.2)
    assert "the setting env.prompts_file is now called data.file; rename it" in caplog.text
    assert load_config(SFTRunConfig, overrides=["data.num_examples=7"]).data.limit == 7
    assert "the setting data.num_examples is now called data.limit; rename it" in caplog.text


@pytest.mark.parametrize(("file", "fraction"), [(None, 0.3), ("talk.jsonl", 0.1)])
def test_an_old_supervised_run_keeps_the_fraction_that_it_used(file, fraction):
    old = {
        "env": {"prompts_file": None, "validation_fraction": 0.3},
        "data": {"file": file, "validation_fraction": 0.1, "num_examples": None},
    }
    assert load_config(SFTRunConfig, old).data.validation_fraction == fraction


def test_later_layers_win_by_either_name():
    layers = [{"data": {"validation_fraction": 0.2}}, {"env": {"validation_fraction": 0.3}}]
    assert load_config(GRPORunConfig, *layers).data.validation_fraction == 0.3
    assert load_config(GRPORunConfig, *reversed(layers)).data.validation_fraction == 0.2
