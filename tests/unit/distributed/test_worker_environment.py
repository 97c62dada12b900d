"""What the driver passes on to ranks on other machines."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lucidrl.distributed.workers.ray_actor import DriverProgram, own_paths, passed_variables


@pytest.mark.parametrize(
    "name",
    ["OMP_NUM_THREADS", "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "LUCIDRL_PROFILING", "TORCHRL_PROFILING"],
)
def test_variables_that_change_what_a_rank_computes_are_passed_on(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert passed_variables()[name] == "1"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGINGFACE_TOKEN", "LUCIDRL_API_KEY", "TORCH_PASSWORD", "HF_SECRET_x", "WANDB_API_KEY", "PATH"],
)
def test_secrets_and_what_belongs_to_a_machine_are_not(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert name not in passed_variables()


def test_own_paths_are_those_that_were_not_installed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend("")
    paths = own_paths()
    assert paths[:2] == [os.getcwd(), str(tmp_path)]
    assert not [path for path in paths if "site-packages" in path or path.startswith(sys.prefix)]


@pytest.mark.slow
def test_processes_of_a_node_see_the_drivers_main_module_its_modules_and_its_folder(tmp_path):
    """As if the script below ran on another node: a rank there makes objects of classes of the driver's main module."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "helper.py").write_text("NUMBER = 42\n")
    (tmp_path / "script.py").write_text("import helper\nclass Worker:\n    number = helper.NUMBER\n")
    program = DriverProgram(
        paths=[str(tmp_path / "modules")],
        folder=str(tmp_path),
        arguments=["script.py", "--fast"],
        main_name=None,
        main_file=str(tmp_path / "script.py"),
        environment={"NCCL_DEBUG": "INFO"},
    )
    code = (
        "import multiprocessing, os, sys\n"
        "from lucidrl.distributed.workers.ray_actor import DriverProgram\n"
        "from tests.unit.distributed.toy_workers import print_main\n"
        "if __name__ == '__main__':\n"
        f"    program = {program!r}\n"
        "    program.enter()\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    with program.as_main():\n"
        "        process = context.Process(target=print_main)\n"
        "        process.start()\n"
        "    process.join()\n"
    )
    (tmp_path / "agent.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(own_paths()), "OMP_NUM_THREADS": "7"}
    command = [sys.executable, str(tmp_path / "agent.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == ["42", str(tmp_path), "script.py --fast", "INFO", "None"]
