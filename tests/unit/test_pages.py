"""The documentation: links lead somewhere, settings and commands exist, code runs, generated pages are up to date."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
import typer
import yaml

from lucidrl.cli import app
from lucidrl.recipes.configs import DistillRunConfig, GRPORunConfig, PPORunConfig, SFTRunConfig
from lucidrl.recipes.preference_configs import DPORunConfig, RewardModelRunConfig
from lucidrl.recipes.settings import preset_path
from lucidrl.utils.config import load_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("**/*.md"))]
SCHEMAS = {
    "grpo": GRPORunConfig,
    "distill": DistillRunConfig,
    "sft": SFTRunConfig,
    "dpo": DPORunConfig,
    "reward-model": RewardModelRunConfig,
    "ppo": PPORunConfig,
}
COMMANDS = typer.main.get_command(app).commands
page_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page: Path, *languages: str) -> list[str]:
    """Code blocks of a page in one of the languages; "" is a block that names none."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, flags=re.DOTALL | re.MULTILINE)
    return [code for _, language, code in found if language in languages]


def shell_lines(page: Path) -> Iterator[list[str]]:
    """Words of each command in the untagged blocks of a page; comments removed, continued lines joined."""
    for block in blocks(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(lucidrl|\.venv/bin/lucidrl|make|python|\$ ?torchrun) ", line):
                yield shlex.split(line, comments=True)


def undocumented(names: Iterable[str]) -> set[str]:
    """Recorded metrics that docs/metrics.md does not list; `accuracy` is a metric of environments."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    listed = [name for name in re.findall(r"`([\w./<>]+)`", text) if not re.search(r"/<name>(_s)?$", name)]
    patterns = [re.sub(r"<\w+>", r"\\d+", name.replace(".", r"\.").replace("<process>", r"\w+-\d+")) for name in listed]
    own = {"step", "time", "train/accuracy", "validation/accuracy", "train/attempts", "validation/attempts"}
    return {name for name in set(names) - own if not any(re.fullmatch(pattern, name) for pattern in patterns)}


@page_name
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in _anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_the_page_of_examples_includes_every_example():
    text = (DOCS / "examples.md").read_text(encoding="utf-8")
    included = re.findall(r'^--8<-- "examples/(\w+\.py)"$', text, flags=re.MULTILINE)
    assert {*included, "make_smollm2.py"} == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_every_page_is_in_the_navigation():
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"([\w/-]+\.md)$", text, flags=re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md")}


@page_name
def test_settings_named_in_the_pages_exist(page):
    reference = (DOCS / "configuration-reference.md").read_text(encoding="utf-8")
    known = re.findall(r"^\| `([\w.]+)`", reference, flags=re.MULTILINE)
    sections = "|".join({key.partition(".")[0] for key in known if "." in key})
    if page.name == "CHANGELOG.md":  # names old settings too
        return
    # Messages about unknown keys are quoted, too; so are the names of other libraries, in the first column of tables.
    text = re.sub(r"unknown key \S+", "", page.read_text(encoding="utf-8"))
    if page.name == "coming-from.md":
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    for name in re.findall(rf"(?<![\w./])(?:{sections})\.[a-z_.]*[a-z_]", text):
        is_key = any(f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.") for key in known)
        assert is_key or name.endswith((".py", ".yaml", ".json", ".jsonl", ".lock", ".md", ".svg", ".html")), (
            f"{page.name} names {name}"
        )


@page_name
def test_commands_of_the_pages_are_commands(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for program, *words in shell_lines(page):
        if program.endswith("lucidrl"):
            _check_command(words)
        elif program == "make":
            assert {word for word in words if "=" not in word} <= targets, f"make {words}"
        elif program == "python" and not words[0].startswith("-") and words[0] != "train_ranks.py":
            assert (ROOT / words[0]).exists(), words[0]


def _check_command(words: list[str]) -> None:
    """A command line names a command, options that it has, and settings that its config accepts."""
    if words == ["--help"]:
        return
    name, *rest = words
    command = COMMANDS[name]
    if hasattr(command, "commands"):  # a group, such as `lucidrl data show`
        name, *rest = rest
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    flags = {option for parameter in command.params if getattr(parameter, "is_flag", 0) for option in parameter.opts}
    arguments: list[str] = []
    values: dict[str, str] = {}
    rest = rest[: rest.index("<")] if "<" in rest else rest
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            assert word in options, f"lucidrl {name} has no option {word}"
            values[word] = "" if word in flags else rest.pop(0)
        else:
            arguments.append(word)
    if name == "generate":
        assert arguments, "lucidrl generate needs a run"
        has_prompts = [len(arguments) > 1, "--file" in values, "--chat" in values]
        assert has_prompts.count(True) == 1, f"lucidrl generate {arguments} needs prompts of one kind"
        return
    if name in ("play", "clean", "show", "runs", "compare", "timeline", "report", "merge"):
        return
    if name == "eval":
        assert "=" not in arguments[0], "lucidrl eval needs a run or model"
        arguments = [argument for argument in arguments if "=" in argument]
    assert all("=" in argument for argument in arguments), arguments
    schema = SCHEMAS[values.get("--algorithm", name if name in SCHEMAS else "grpo")]
    preset = [preset_path(values["--preset"])] if "--preset" in values else []
    overrides = [argument for argument in arguments if "$" not in argument]
    load_config(schema, *preset, overrides=overrides)


@page_name
def test_code_of_the_pages_can_be_parsed(page):
    for code in blocks(page, "python"):
        if not code.startswith("--8<--"):
            ast.parse(code)
    for code in blocks(page, "yaml"):
        assert yaml.safe_load(code)
    for code in blocks(page, "json"):
        for line in code.splitlines():
            assert json.loads(line)
    for code in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
    for included in re.findall(r'--8<-- "([^"]+)"', page.read_text(encoding="utf-8")):
        assert (ROOT / included).exists(), included


def test_the_settings_file_of_the_page_is_valid(tmp_path):
    [code, *_] = [code for code in blocks(DOCS / "configuration.md", "yaml") if "mine.yaml" in code]
    (tmp_path / "mine.yaml").write_text(code)
    assert load_config(GRPORunConfig, tmp_path / "mine.yaml").grpo.max_steps == 100


@pytest.mark.parametrize(
    "page",
    [
        "docs/configuration.md",
        "docs/environments.md",
        "docs/how-it-works.md",
        "docs/resume.md",
        "docs/runs.md",
        "docs/tutorials/first-run.md",
        "docs/tutorials/own-reward.md",
        "docs/tutorials/profile-a-run.md",
    ],
)
def test_small_programs_of_the_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    run = Path("runs/grpo/exp_001")
    run.mkdir(parents=True)
    lines = [
        {"step": step, "train/reward": 0.5, "time/step_s": 1.0, "time/exclusive/forward_s": 0.5} for step in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = 0
    for code in blocks(ROOT / page, "python"):
        if re.search(r"^(import|from|class Curriculum)", code, flags=re.MULTILINE):  # the others are shortened
            exec(compile(code, page, "exec"), {"__name__": "page"})
            ran += 1
    assert ran


@pytest.mark.slow
def test_the_page_about_trainers_is_one_program_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "train.parquet")
    code = "\n".join(blocks(DOCS / "python.md", "python"))
    small = {"path/to/model": "embedded", "max_steps=50": "max_steps=2", "=200": "=2", "=400": "=4"}
    for written, instead in small.items():
        assert written in code
        code = code.replace(written, instead)
    exec(compile(code, "python.md", "exec"), {"__name__": "page"})
    assert Path("out/config.json").is_file()
    assert Path("cartpole/model.safetensors").is_file()


@pytest.mark.slow
def test_programs_about_ranks_run(tmp_path):
    in_python, torchrun = [code for code in blocks(DOCS / "ranks.md", "python") if "import" in code]
    assert "dp=2 x cp=1 x tp=1" in _run_script(tmp_path / "two.py", in_python)
    assert "dp=1 x cp=1 x tp=1, step 20: loss 1.553" in _run_script(tmp_path / "train_ranks.py", torchrun)
    [refit] = blocks(DOCS / "refit.md", "python")
    _run_script(tmp_path / "refit.py", refit)


@pytest.mark.slow
def test_the_logging_page_shows_programs_that_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    send_again, own_program = blocks(DOCS / "logging.md", "python")
    _run_script(tmp_path / "own.py", own_program)  # separate processes: wandb reads its settings once per process
    rows = [json.loads(line) for line in Path("runs/mine/exp_001/samples/step_3.jsonl").read_text().splitlines()]
    assert [row["input_ids"] for row in rows] == [[5, 6], [7, 8, 9]]
    _run_script(tmp_path / "again.py", send_again.replace("runs/grpo/exp_001", "runs/mine/exp_001"))
    assert len(list(Path("wandb").glob("offline-run-*/*.wandb"))) == 1


@pytest.mark.parametrize(
    ("function", "page"), [("reference", "configuration-reference.md"), ("commands", "command-line.md")]
)
def test_generated_pages_are_up_to_date(function, page):
    script = runpy.run_path(str(DOCS / "make_reference.py"))
    assert (DOCS / page).read_text(encoding="utf-8") == script[function](), "run `python docs/make_reference.py`"


def test_api_pages_name_objects_that_exist():
    for page in DOCS.glob("api/*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert _resolves(name), f"{page.name} documents {name}"


def _resolves(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    return True


def _run_script(path: Path, code: str) -> str:
    path.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path)], text=True, capture_output=True, cwd=path.parent, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
