"""A run that was killed and resumed ends bit-identical to an uninterrupted run.

The kill is a real SIGKILL of the command, at a moment that the run itself chooses.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.recipes.configs import GRPORunConfig, SFTRunConfig
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from lucidrl.utils.run_folder import occupied
from tests.faults.records import digests, metrics

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "num_threads=1",
    "cluster.num_threads=1",
    "env.name=tests.faults.drawing:DrawingEnv",
    "data.validation_fraction=0",
    "env.max_concurrency=1",
    "policy.generation.max_new_tokens=4",
    "policy.precision=bfloat16",
    "policy.optimizer={name: tests.faults.drawing.NoisyAdamW, kwargs: {lr: 0.001}}",
    "policy.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 8}}",
    "policy.sequence_packing.enabled=false",
    "policy.train_micro_batch_size=3",
    "validation.num_prompts=0",
    "checkpoint.metric=null",
    "checkpoint.every=1",
    "tracking.tensorboard=false",
    "tracking.monitor=false",
    "tracking.dump_samples_every=1",
)
# Ten prompts, of which a step takes four (or twelve of ten examples): epochs end within steps.
OF_ALGORITHM = {
    "grpo": ("collector.prompts_per_step=4", "collector.samples_per_prompt=3", "grpo.loss.entropy_coefficient=0.01"),
    "sft": ("sft.examples_per_step=12",),
}
MICRO_BATCHES = 4
"""Of a step on one rank: 12 rows, 3 at a time; on two ranks half as many."""
TWO_RANKS = "cluster.num_workers=2"


class Unwatched:
    def on_validation(self, step, metrics): ...

    def on_samples(self, step, message_logs, rewards): ...

    def on_step(self, step, metrics): ...

    def announce(self, message):
        assert not message.startswith("resuming"), "on the same layout there is nothing to say"


def in_this_process(algorithm: str, folder: Path, *settings: str, resume: bool = False) -> dict[str, str]:
    """Digests of a run that nothing happens to."""
    folder.mkdir(exist_ok=True)
    schema = GRPORunConfig if algorithm == "grpo" else SFTRunConfig
    config = load_config(schema, overrides=[*SETTINGS, *OF_ALGORITHM[algorithm], *settings])
    with occupied(folder):
        train(config, folder, Unwatched(), resume)
    return digests(folder)


def killed(algorithm: str, folder: Path, kill_at: str, *settings: str) -> int:
    """Run the command until it kills itself; the step of its newest checkpoint."""
    note, no_preset = folder.with_suffix(".note"), folder.with_suffix(".yaml")
    no_preset.write_text("seed: 0\n")
    command = [sys.executable, "-c", "from tests.faults.killing import main; main()", algorithm]
    command += [
        "--config",
        str(no_preset),
        *SETTINGS,
        *OF_ALGORITHM[algorithm],
        *settings,
        f"run.root={folder.parent}",
        f"run.name={folder.name}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KILL_AT": kill_at, "KILL_NOTE": str(note)}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == -signal.SIGKILL, result.stdout + result.stderr
    assert note.read_text() == kill_at
    return CheckpointManager(folder / "checkpoints").latest().step


def assert_equal_after_a_kill(algorithm: str, folder: Path, kill_at: str, steps: int, *settings: str) -> None:
    settings = (*settings, f"{algorithm}.max_steps={2 * steps}")
    saved = killed(algorithm, folder / "broken", kill_at, *settings)
    # What was not reported as saved may be lost: the one that was being written, when the next step began.
    assert saved in (steps - 1, steps)
    assert metrics(folder / "broken")[-1]["step"] <= steps
    assert (folder / "broken" / "run.lock").exists()
    resumed = in_this_process(algorithm, folder / "broken", *settings, resume=True)
    assert resumed == in_this_process(algorithm, folder / "whole", *settings)
    assert resumed["step"] == str(2 * steps)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_killed_between_two_micro_batches_of_a_step(tmp_path, algorithm):
    assert_equal_after_a_kill(algorithm, tmp_path, f"loss:{3 * MICRO_BATCHES + 2}", 3)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.parametrize("steps", [2, 5])
def test_killed_at_the_first_and_the_last_micro_batch_of_a_step(tmp_path, algorithm, steps):
    call = steps * MICRO_BATCHES + (1 if steps == 2 else MICRO_BATCHES)
    assert_equal_after_a_kill(algorithm, tmp_path, f"loss:{call}", steps)


@pytest.mark.slow
def test_killed_while_the_completions_of_a_step_are_scored(tmp_path):
    assert_equal_after_a_kill(
        "grpo", tmp_path, "env:4", 3, "env.name=tests.faults.killing:KillingEnv", "env.isolation=none"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "steps", "call"), [("grpo", 2, 2), ("sft", 3, 1)])
def test_killed_between_two_micro_batches_of_a_step_on_two_ranks(tmp_path, algorithm, steps, call):
    kill_at = f"loss:{steps * MICRO_BATCHES // 2 + call}"
    assert_equal_after_a_kill(algorithm, tmp_path, kill_at, steps, TWO_RANKS)


@pytest.mark.slow
def test_on_another_layout_what_is_fresh_is_said_and_the_data_go_on(tmp_path):
    said: list[str] = []

    class Listening(Unwatched):
        def announce(self, message):
            said.append(message)

    for workers, steps in ((1, 2), (2, 4)):
        settings = (*SETTINGS, *OF_ALGORITHM["grpo"], f"cluster.num_workers={workers}", f"grpo.max_steps={steps}")
        (tmp_path / "run").mkdir(exist_ok=True)
        train(load_config(GRPORunConfig, overrides=settings), tmp_path / "run", Listening(), resume=workers == 2)
    assert [message for message in said if message.startswith("resuming")] == [
        "resuming on another layout (DTensorPolicyWorker dp=2 x cp=1 x tp=1 on CPU, saved on DTensorPolicyWorker "
        "dp=1 x cp=1 x tp=1 on CPU): weights, optimizer, schedule, data order and the driver's random state are "
        "restored, but the ranks' random states are new; results will not be bit-exact"
    ]
    whole = in_this_process("grpo", tmp_path / "whole", "grpo.max_steps=4")
    assert digests(tmp_path / "run")["batch order"] == whole["batch order"]
