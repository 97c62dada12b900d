"""Tasks of lm-evaluation-harness score our models as its own Hugging Face back end does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")
pytest.importorskip("accelerate", reason="the back end hf of lm-eval needs it")

from lucidrl.errors import ConfigError  # noqa: E402
from lucidrl.lm_eval import checked_model_args, registered_class  # noqa: E402
from lucidrl.models.embedded import embedded_model, embedded_tokenizer  # noqa: E402

ROOT = Path(__file__).parents[2]
PROBLEMS = [(a, b) for a in range(3, 9) for b in (2, 5, 7)]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{problem}}}}"
doc_to_target: {target}
{rest}
"""
CHOICE = "doc_to_choice: '{{choices}}'\nmetric_list: [{metric: acc}, {metric: acc_norm}]"
GENERATE = (
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}\nmetric_list: [{metric: exact_match}]'
)
ROLLING = "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    embedded_model(warm=True, seed=0, attn_implementation="eager").save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Tasks of the three kinds, on rows of a JSON file."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"problem": f"{a}+{b}=", "answer": str(a + b), "choices": [str(a + b + d) for d in (0, 1, 10)], "right": 0}
        for a, b in PROBLEMS
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {
        "sums_choice": ("multiple_choice", "right", CHOICE),
        "sums_generate": ("generate_until", "answer", GENERATE),
        "sums_rolling": ("loglikelihood_rolling", '"{{problem}}{{answer}}"', ROLLING),
    }
    for name, (kind, target, rest) in kinds.items():
        text = TASK.format(name=name, file=file, kind=kind, target=target, rest=rest)
        if kind == "loglikelihood_rolling":
            text = text.replace('doc_to_text: "{{problem}}"', 'doc_to_text: ""')
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.slow
def test_scores_equal_those_of_the_back_end_of_the_harness(model, tasks):
    from lm_eval.tasks import TaskManager

    registered_class()
    found = {}
    for back_end in ("hf", "lucidrl"):
        arguments = f"pretrained={model},dtype=float32"
        found[back_end] = lm_eval.simple_evaluate(
            model=back_end,
            model_args=arguments,
            tasks=["sums_choice", "sums_generate", "sums_rolling"],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            device="cpu",
            batch_size=4,
            bootstrap_iters=0,
        )["results"]
    for task, expected in found["hf"].items():
        for name, value in expected.items():
            if isinstance(value, float):
                assert found["lucidrl"][task][name] == pytest.approx(value, rel=1e-4), (task, name)
    assert found["hf"]["sums_generate"]["exact_match,none"] > 0


@pytest.mark.slow
def test_the_command_of_the_page_runs(tasks, tmp_path):
    words = ["--model", "lucidrl", "--model_args", "pretrained=embedded", "--tasks", "sums_generate"]
    done = subprocess.run(
        [sys.executable, "-m", "lucidrl.lm_eval", *words, "--include_path", str(tasks)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "exact_match" in done.stdout


@pytest.mark.parametrize(
    ("model_args", "complaint"),
    [
        (
            "pretraned=m",
            "pretraned=m in --model_args is not an argument of .* lucidrl; did you mean pretrained?",
        ),
        ("pretrained=m,max_len=9", "max_len=9 in --model_args is not .*; did you mean max_length?"),
        ("pretrained=m,peft=x", "peft=x in --model_args is not .*; use pretrained, dtype or max_length"),
        ("dtype=float32", "--model_args has no pretrained; add pretrained="),
    ],
)
def test_wrong_model_args_are_refused(model_args, complaint):
    with pytest.raises(ConfigError, match=complaint):
        registered_class().create_from_arg_string(model_args, {"batch_size": 1, "device": "cpu"})


def test_arguments_that_the_harness_adds_are_accepted():
    added = {"batch_size": 1, "max_batch_size": None, "device": "cpu", "trust_remote_code": True}
    assert checked_model_args({"pretrained": "m", **added}) == {"pretrained": "m"}


def test_long_texts_are_scored_in_windows(model):
    from lucidrl.lm_eval import Backend, rolling_loglikelihoods

    whole, short = Backend(str(model)), Backend(str(model), max_length=4)
    text = "12+30=42"
    assert rolling_loglikelihoods(short, [text])[0] != pytest.approx(rolling_loglikelihoods(whole, [text])[0])
    assert rolling_loglikelihoods(whole, [text, "1"])[0] == pytest.approx(rolling_loglikelihoods(whole, [text])[0])
