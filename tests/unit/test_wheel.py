"""The wheel runs outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["grpo.max_steps=2", "collector.prompts_per_step=2", "validation.num_prompts=2", "tracking.tensorboard=false"]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], text=True, capture_output=True, cwd=cwd, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Folder of the programs of a fresh environment that has the wheel, and sees the dependencies of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: setuptools writes build/ and egg-info beside the sources.
    tracked = run("git", "ls-files", "lucidrl", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT).splitlines()
    for name in tracked:
        copy = folder / "sources" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder / "dist", folder / "sources", cwd=folder)
    [wheel] = (folder / "dist").glob("lucidrl-*.whl")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", wheel, cwd=folder)
    # Dependencies come from this environment, after the wheel's own packages; an editable lucidrl does not come along,
    # because a path added this way runs no .pth files.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder).strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


@pytest.mark.slow
def test_the_wheel_trains_outside_the_checkout(installed, tmp_path):
    location = run(installed / "python", "-c", "import lucidrl; print(lucidrl.__file__)", cwd=tmp_path)
    assert Path(location.strip()).is_relative_to(installed.parent)
    run(installed / "lucidrl", "grpo", *SMALL, cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "runs/grpo/exp_001/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/reward" in line] == [1, 2]


@pytest.mark.slow
def test_the_wheel_holds_its_data_files(installed, tmp_path):
    assert "lucidrl ppo" in run(installed / "lucidrl", "--help", cwd=tmp_path)
    program = "from lucidrl.recipes.settings import preset_path; print(preset_path('demo').read_text())"
    assert "max_steps: 500" in run(installed / "python", "-c", program, cwd=tmp_path)
