"""The command line: every command does its work, every mistake is one sentence, and Ctrl-C loses nothing."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.models.embedded import embedded_config, embedded_tokenizer
from lucidrl.models.generation import engine
from lucidrl.models.generation.sampling import draw
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.display import RunDisplay
from lucidrl.recipes.run import _show_training

SMALL = [
    "env.kwargs={operations: ['+'], max_operand: 9}",
    "collector.prompts_per_step=4",
    "collector.samples_per_prompt=4",
    "validation.num_prompts=8",
    "grpo.max_steps=2",
    "tracking.tensorboard=false",
]
SEVEN_STEPS = GRPORunConfig.model_validate({"grpo": {"max_steps": 7}})
ENVS = '''
import asyncio, pathlib

class Slow:
    """Touches the file `called`, then sleeps."""
    def __init__(self, delay_s):
        self.delay_s = delay_s
    async def step(self, batch):
        from lucidrl.envs.text.interfaces import EnvReply
        pathlib.Path("called").touch()
        await asyncio.sleep(self.delay_s)
        return [EnvReply(float(len(request.completion))) for request in batch]

class Synchronous:
    def step(self, batch):
        return []

class Counted:
    """Notes how often it is created and how often `prompts` is called."""
    def __init__(self):
        note("made")
    def prompts(self):
        from lucidrl.data.datasets import Prompt
        note("prompts")
        ask = [f"what's {n}+1?" for n in range(10, 40)]
        return [Prompt(text, ({"role": "user", "content": text},), {"answer": "1"}) for text in ask]
    async def step(self, batch):
        from lucidrl.envs.text.interfaces import EnvReply
        return [EnvReply(float(len(request.completion))) for request in batch]

def note(event):
    with open("events", "a") as file:
        print(event, file=file)

class Exiting(Counted):
    def __init__(self):
        raise SystemExit(0)

class Wild(Counted):
    def __init__(self):
        pass
    def prompts(self):
        raise BaseException("a special kind")
'''

CONTROL_ENVS = """
import gymnasium
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

class Idle(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}

class Several(Idle):
    observation_space = Dict({"a": Box(0, 1, (2,)), "b": Box(0, 1, (2,))})
    action_space = Discrete(2)

class Switches(Idle):
    observation_space = Box(0, 1, (2,))
    action_space = MultiBinary(3)

class Failing(Idle):
    def __init__(self):
        raise ValueError("no licence")

class Exiting(Idle):
    def __init__(self):
        raise SystemExit(0)

for env in (Several, Switches, Failing, Exiting):
    gymnasium.register(f"{env.__name__}-v0", env)
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working directory with what the commands below refer to."""
    monkeypatch.chdir(tmp_path)
    LlamaConfig().save_pretrained("bare_model")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    words.save_pretrained("bare_model")
    embedded_config().save_pretrained("model_without_weights")
    embedded_tokenizer().save_pretrained("model_without_weights")
    Path("empty.jsonl").touch()
    Path("no_chosen.jsonl").write_text('{"prompt": "1+1=", "rejected": "3"}')
    pair = '{"prompt": "1+1=", "chosen": "2", "rejected": "%s"}'
    Path("equal.jsonl").write_text(f"{pair % 3}\n{pair % 2}")
    rows = [*({"id": f"p{n}", "prompt": f"{n}+1="} for n in range(30)), {"id": "tale", "prompt": "x" * 600}]
    Path("long.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    Path("short.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows[:-1])))
    Path("list.yaml").write_text("- 1\n")
    Path("a_file").touch()
    Path("taken/run").mkdir(parents=True)
    Path("taken/run/config.yaml").touch()
    Path("cli_envs.py").write_text(ENVS)
    Path("cli_control_envs.py").write_text(CONTROL_ENVS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def without_clock(folder: Path) -> list[dict]:
    records = [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [
        {
            k: v
            for k, v in record.items()
            if k not in ("time", "train/tokens_per_s", "train/frames_per_s")
            and not k.startswith(("time/", "observe/", "logger/"))
        }
        for record in records
        if "step" in record and "time/whole_step_s" not in record
    ]


MISTAKES = {
    "ranks that do not split": (
        ["grpo", "cluster.num_workers=3", "policy.dtensor_cfg.tensor_parallel_size=2"],
        ["3 ranks do not split", "cluster.num_workers to a multiple of 2"],
    ),
    "a cut through heads": (
        ["grpo", "cluster.num_workers=3", "policy.dtensor_cfg.tensor_parallel_size=3"],
        ["tensor_parallel_size=3 does not divide", "num_attention_heads=4"],
    ),
    "packed rows split over ranks": (
        ["grpo", "cluster.num_workers=2", "policy.dtensor_cfg.context_parallel_size=2"],
        ["context_parallel_size=2", "sequence_packing.enabled=false"],
    ),
    "tensor parallel with FSDP1": (
        [
            "grpo",
            "cluster.num_workers=2",
            "policy.dtensor_cfg.enabled=false",
            "policy.dtensor_cfg.tensor_parallel_size=2",
        ],
        ["tensor_parallel_size=2"],
    ),
    "unknown precision": (["grpo", "policy.precision=int8"], ["policy.precision", "int8", "bfloat16"]),
    "unknown key": (["grpo", "polcy.model_name=x"], ["unknown key polcy", "did you mean policy?"]),
    "negative learning rate": (["grpo", "policy.optimizer.kwargs.lr=-1"], ["lr=-1", "positive number"]),
    "no equals sign": (["grpo", "fast"], ["'fast'", "key=value"]),
    "missing model": (["grpo", "policy.model_name=nowhere"], ["'nowhere'", "does not exist", "Hugging Face"]),
    "distillation without a teacher": (["distill"], ["teacher.model_name is not set", "run folder"]),
    "missing teacher": (
        ["distill", "teacher.model_name=nowhere"],
        ["teacher.model_name='nowhere'", "does not exist", "Hugging Face"],
    ),
    "more candidates than tokens": (
        ["distill", "teacher.model_name=embedded", "distill.top_k=1000"],
        ["distill.top_k=1000", "102 tokens of the vocabulary", "at most distill.top_k=102"],
    ),
    "distillation of nothing": (
        ["distill", "teacher.model_name=embedded", "distill.teacher_coefficient=0"],
        ["teacher_coefficient=0 and reward_coefficient=0", "nothing to learn"],
    ),
    "a teacher of two ranks in one process": (
        ["distill", "teacher.model_name=embedded", "teacher.num_workers=2"],
        ["num_workers=2", "placement=separate"],
    ),
    "preferences without chosen": (
        ["dpo", "data.file=no_chosen.jsonl"],
        ["no_chosen.jsonl:1", "has no column 'chosen' (data.chosen)", "it has prompt, rejected"],
    ),
    "preferences that are equal": (
        ["reward-model", "data.file=equal.jsonl"],
        ["equal.jsonl:2", "chosen and rejected are equal", "remove the row"],
    ),
    "a reward model without a head": (
        ["grpo", "data.file=prompts.jsonl", "reward=model:model_without_weights"],
        ["model_without_weights has no score head", "lucidrl reward-model"],
    ),
    "a reward model that does not exist": (
        ["grpo", "data.file=prompts.jsonl", "reward=model:nowhere"],
        ["reward='nowhere'", "does not exist"],
    ),
    "pairs in several optimizer steps": (
        ["dpo", "policy.train_global_batch_size=8"],
        ["policy.train_global_batch_size=8 does not apply", "dpo.examples_per_step"],
    ),
    "a tensor parallel reward model": (
        ["reward-model", "cluster.num_workers=2", "policy.dtensor_cfg.tensor_parallel_size=2"],
        ["tensor_parallel_size=2 does not apply to a reward model"],
    ),
    "a column of preferences for samples": (
        ["grpo", "data.file=prompts.jsonl", "data.chosen=good"],
        ["data.chosen=good would have no effect", "lucidrl dpo"],
    ),
    "model without weights": (["grpo", "policy.model_name=model_without_weights"], ["model_without_weights"]),
    "tokenizer without pad or eos": (["grpo", "policy.model_name=bare_model"], ["bare_model", "set policy.pad_token"]),
    "empty dataset": (["grpo", "data.file=empty.jsonl"], ["empty.jsonl has no rows", "one JSON object"]),
    "missing dataset": (["grpo", "data.file=absent.jsonl"], ["absent.jsonl does not exist"]),
    "missing examples": (["sft", "data.file=absent.jsonl"], ["absent.jsonl does not exist"]),
    "prompt too long": (
        ["grpo", "data.file=long.jsonl"],
        ["'tale' (long.jsonl:", "602 tokens", "max_prompt_tokens=511"],
    ),
    "missing column": (
        ["grpo", "data.file=long.jsonl", "data.prompt=question"],
        ["long.jsonl:1: has no column 'question' (data.prompt); it has "],
    ),
    "column of another name in a template": (
        ["grpo", "data.file=long.jsonl", "data.template={{ question }}"],
        ["long.jsonl:1: data.template fails: 'question' is undefined; the columns are "],
    ),
    "data show without a file": (["data", "show", "data.limit=3"], ["no file is named"]),
    "data show of an unknown kind": (["data", "show", "list.yaml"], ["list.yaml has the unknown extension .yaml"]),
    "batch that does not divide": (
        ["grpo", "policy.train_global_batch_size=100", "collector={prompts_per_step: 32, samples_per_prompt: 8}"],
        ["256 rows", "32 x collector.samples_per_prompt=8", "policy.train_global_batch_size=100", "multiple"],
    ),
    "root below a file": (["grpo", "run.root=a_file/runs"], ["run.root='a_file/runs'", "cannot be written"]),
    "root without write permission": (["grpo", "run.root=/proc/runs"], ["run.root='/proc/runs'", "cannot be written"]),
    "name that leaves the root": (["grpo", "run.name=../x"], ["run.name='../x'", "leaves run.root"]),
    "name that is taken": (["grpo", "run.root=taken", "run.name=run"], ["taken/run holds a run already", "--resume"]),
    "unknown preset": (["grpo", "--preset", "demon"], ["'demon'", "chat, demo"]),
    "missing config": (["grpo", "--config", "absent.yaml"], ["absent.yaml does not exist"]),
    "config that is a list": (["grpo", "--config", "list.yaml"], ["list.yaml", "must be a mapping"]),
    "unknown environment": (["grpo", "env.name=arithmetik"], ["'arithmetik'", "did you mean arithmetic?"]),
    "environment without async step": (["grpo", "env.name=cli_envs:Synchronous"], ["async def step(self, batch)"]),
    "environment that exits": (
        ["grpo", "env.name=cli_envs:Exiting"],
        ["SystemExit: 0", "cli_envs:Exiting cannot be made"],
    ),
    "environment that raises no Exception": (
        ["grpo", "env.name=cli_envs:Wild"],
        ["cli_envs:Wild.prompts raised BaseException: a special kind"],
    ),
    "check of an environment that exits": (["check", "env.name=cli_envs:Exiting"], ["SystemExit: 0"]),
    "control env that exits": (["ppo", "env.name=cli_control_envs:Exiting-v0"], ["SystemExit(0)", "Exiting-v0"]),
    "name with NUL": (["grpo", 'run.name="a\\0b"'], ["run.name='a\\x00b'", "NUL"]),
    "name that is too long": (["grpo", f"run.name={'x' * 300}"], ["300 bytes", "at most 255"]),
    "absurd number of threads": (["grpo", "cluster.num_threads=100000"], ["cluster.num_threads=100000", "1024"]),
    "generate without prompts": (["generate", "taken/run", "-"], ["standard input has no prompts"]),
    "generate from standard input twice": (["generate", "taken/run", "-", "-"], ["the prompt - occurs twice"]),
    "argument of the environment": (["grpo", "env.kwargs.max_operan=3"], ["did you mean env.kwargs.max_operand?"]),
    "resume of no run": (["grpo", "--resume", "taken"], ["taken is not a run folder", "config.yaml"]),
    "resume with a preset": (["grpo", "--resume", "taken", "--preset", "demo"], ["remove --config and --preset"]),
    "generate from no run": (
        ["generate", "taken", "1+1="],
        ["RUN='taken': this folder has no config.json", "a run folder"],
    ),
    "generate without any prompts": (
        ["generate", "taken/run"],
        ["no prompts given; write one of PROMPT...", "--file", "--chat"],
    ),
    "generate from two sources": (["generate", "taken/run", "1+1=", "--chat"], ["PROMPT and --chat given; write"]),
    "generate to a file without one": (["generate", "taken/run", "1+1=", "--output", "x.jsonl"], ["--output needs"]),
    "chat with samples": (["generate", "taken/run", "--chat", "--samples", "3"], ["--samples 3 does not apply"]),
    "hub id without the prefix": (
        ["grpo", "policy.model_name=org/name"],
        ["'org/name': this folder does not exist; write hub:org/name to download"],
    ),
    "hub id that is none": (["grpo", "policy.model_name=hub:name"], ["'hub:name' is not a name on the hub"]),
    "code of the hub": (
        ["grpo", "policy.model_name=hub:org/name", "policy.trust_remote_code=true"],
        ["policy.trust_remote_code=true does not apply to policy.model_name=hub:org/name"],
    ),
    "run without a checkpoint": (["grpo", "policy.model_name=taken/run"], ["taken/run has no valid checkpoint yet"]),
    "run with an unknown checkpoint": (["grpo", "policy.model_name=taken/run@last"], ["taken/run@best or taken/run@n"]),
    "generate before a checkpoint": (["generate", "taken/run", "1+1="], ["taken/run has no valid checkpoint yet"]),
    "check of an unknown algorithm": (
        ["check", "--algorithm", "ppp"],
        ["--algorithm=ppp", "grpo, distill, sft, dpo, reward-model, ppo"],
    ),
    "unknown control env": (["ppo", "env.name=CartPol-v1"], ["'CartPol-v1'", "CartPole"]),
    "argument of the control env": (["ppo", "env.kwargs.gravity=1"], ["'CartPole-v1'", "gravity"]),
    "frames that do not split into minibatches": (
        ["ppo", "ppo.minibatch_frames=100"],
        ["collector.frames_per_batch=2048", "ppo.minibatch_frames=100", "multiple"],
    ),
    "envs that do not share the frames": (["ppo", "env.num_envs=3"], ["env.num_envs=3", "multiple"]),
    "several observations": (["ppo", "env.name=cli_control_envs:Several-v0"], ["a, b", "FlattenObservation"]),
    "several choices": (["ppo", "env.name=cli_control_envs:Switches-v0"], ["Switches-v0", "Discrete or Box"]),
    "optimizer of the critic": (["ppo", "critic.optimizer.kwargs.speed=1"], ["critic.optimizer.kwargs", "speed"]),
    "control env that fails": (
        ["ppo", "env.name=cli_control_envs:Failing-v0"],
        ["Failing-v0", "ValueError: no licence"],
    ),
    "module of no control env": (["ppo", "env.name=absent_envs:A-v0"], ["no module absent_envs", "module:Name"]),
    "endless spread": (["ppo", "policy.initial_std=inf"], ["policy.initial_std", "finite number"]),
    "resume of a control run that is none": (["ppo", "--resume", "taken"], ["taken is not a run folder"]),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(lucidrl, workplace, arguments, said):
    before = sorted(workplace.rglob("*"))
    code, _, errors = lucidrl(*arguments)
    assert code != 0
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1, errors
    assert all(part in errors for part in said), errors
    left = {path for path in workplace.rglob("*") if "__pycache__" not in path.parts} - set(before)
    # Only the weights are looked at after the run folder was made.
    assert not left or "model_without_weights" in str(arguments)


@pytest.mark.parametrize(
    "command",
    ["grpo", "distill", "sft", "dpo", "reward-model", "ppo", "generate", "play", "check", "clean", "runs", "compare"],
)
def test_help_shows_an_example(lucidrl, command):
    code, output, _ = lucidrl(command, "--help")
    assert code == 0
    assert f"lucidrl {command} " in output.split("Arguments")[0].partition("Usage")[2].partition("\n")[2]


def test_version_is_printed(lucidrl):
    code, output, _ = lucidrl("--version")
    assert code == 0
    assert output.startswith("lucidrl ")


def test_check_loads_no_weights_and_prints_arithmetic_and_memory(lucidrl, workplace):
    code, output, errors = lucidrl("check", "policy.model_name=model_without_weights", *SMALL)
    assert (code, errors) == (0, "")
    for part in (
        "max_steps: 2",
        "rows per step             16",
        "memory: total (estimate)",
        "checkpoint on disk",
        "ok: this run can start",
    ):
        assert part in output
    assert not (workplace / "runs").exists()


def test_check_says_the_preset_the_sources_and_what_is_wrong(lucidrl, workplace):
    overrides = [*SMALL, "num_generations=1", "lr=1e-5", "epsilon=0.3"]
    code, output, errors = lucidrl("check", "--explain", *(text for text in overrides if "samples_per" not in text))
    assert (code, errors) == (0, "")
    assert output.startswith("grpo: embedded on arithmetic (preset demo)\n")
    lines = [line.split() for line in output.splitlines()]
    assert ["policy.optimizer.kwargs.lr=1e-05", "#", "command", "line", "(as", "lr)"] in lines
    assert ["policy.generation.temperature=1.5", "#", "preset", "demo"] in lines
    assert ["policy.generation.top_k=0", "#", "default"] in lines
    assert "warning: this run cannot learn from rewards: with collector.samples_per_prompt=1" in output
    assert "grpo.loss.clip_high=0.3 (as epsilon) have no effect" in output
    assert "this run can start, but it will not learn with these settings" in output
    assert "ok: this run can start" not in output


def test_check_generate_compares_generation_with_the_policy(lucidrl, workplace):
    code, output, errors = lucidrl("check", "--generate", *SMALL, "policy.generation.top_p=0.9")
    assert (code, errors) == (0, "")
    assert "ok: generation and policy agree" in output
    rows = [line for line in output.splitlines() if line.rstrip().endswith(" ok")]
    assert len(rows) == 8, output
    assert "sampled tokens cut by top-k, top-p" in rows[-1]
    assert not (workplace / "runs").exists()


def test_check_generate_names_the_fault_and_fails(lucidrl, workplace, monkeypatch):
    monkeypatch.setattr(engine, "draw", lambda logits, *args, **kwargs: draw(2 * logits, *args, **kwargs))
    code, output, errors = lucidrl("check", "--generate", *SMALL, "policy.generation.temperature=1.0")
    assert (code, errors) == (1, "")
    assert "FAILED" in output
    assert "temperature (mean absolute difference" in output
    assert "those of temperature=0.5, but the settings are temperature=1" in output
    assert "failed: generation and policy do not agree" in output


def test_check_generate_of_a_control_run_is_refused(lucidrl, workplace):
    code, _, errors = lucidrl("check", "--generate", "--algorithm", "ppo")
    assert code == 2
    assert "but ppo does not train on such samples" in errors


@pytest.mark.slow
def test_check_generate_compares_weights_of_separate_generators(lucidrl, workplace):
    code, output, errors = lucidrl("check", "--generate", *SMALL, "policy.generation.placement=separate")
    assert code == 0, errors
    assert output.count(": weights and probe") == 2
    assert "ok: generation and policy agree" in output


@pytest.mark.slow
def test_a_run_says_its_preset_first_and_its_warnings_at_start_and_end(lucidrl, workplace):
    code, output, errors = lucidrl("grpo", "--explain", *SMALL, "run.name=run", "max_tokens=1", "epsilon=0.3")
    assert code == 0, errors
    assert output.startswith("grpo: embedded on arithmetic (preset demo), in runs/run\n")
    assert "policy.generation.max_new_tokens=1" in output
    start, _, summary = output.partition("summary")
    for part in (start, summary):
        assert "warning: grpo.loss.clip_low=0.3 (as epsilon) and grpo.loss.clip_high=0.3 (as epsilon) have" in part
    assert "truncated at policy.generation.max_new_tokens=1 or" in summary
    code, output, errors = lucidrl("grpo", "--resume", "runs/run", "max_steps=3")
    assert code == 0, errors
    assert output.startswith("grpo: embedded on arithmetic (settings of the run), in runs/run\n")


@pytest.mark.slow
def test_an_sft_run_says_the_steps_of_its_epochs(lucidrl, workplace):
    small = ["env.kwargs.max_operand=9", "data.num_examples=20", "sft.examples_per_step=8", "validation.num_prompts=0"]
    code, output, errors = lucidrl("sft", *small, "epochs=1", "run.name=run")
    assert code == 0, errors
    assert "step 3/3" in output
    code, output, errors = lucidrl("sft", "--resume", "runs/run", "epochs=2")
    assert code == 0, errors
    assert "step 5/5" in output


def test_check_of_a_control_run_prints_arithmetic_spaces_and_parameters(lucidrl, workplace):
    code, output, errors = lucidrl("check", "--algorithm", "ppo", "--preset", "pendulum", "ppo.max_steps=3")
    assert (code, errors) == (0, "")
    for part in (
        "max_steps: 3",
        "frames per run             6144",
        "[1] numbers from -2 to 2",
        "parameters of the critic  4,481",
        "checkpoint on disk        0.10 MiB (weights and optimizer), at most 3 kept",
        "ok: this run can start",
    ):
        assert part in output
    assert not (workplace / "runs").exists()


def test_a_control_run_can_be_resumed_and_run_again_from_its_config(lucidrl, workplace):
    small = ["collector.frames_per_batch=64", "ppo.minibatch_frames=32", "validation.num_episodes=2"]
    code, output, errors = lucidrl("ppo", *small, "ppo.max_steps=2", "run.name=run", "tracking.tensorboard=false")
    assert code == 0, errors
    assert "ppo: policy and critic on CartPole-v1" in output
    assert "greedy reward" in output
    code, *_ = lucidrl("ppo", "--config", "runs/run/config.yaml", "run.name=again")
    assert code == 0
    assert without_clock(workplace / "runs/again") == without_clock(workplace / "runs/run")
    code, output, _ = lucidrl("ppo", "--resume", "runs/run", "ppo.max_steps=3")
    assert code == 0
    assert CheckpointManager(workplace / "runs/run/checkpoints").latest().step == 3
    code, _, errors = lucidrl("generate", "runs/run", "1+1=")
    assert code != 0
    assert errors.startswith("error: runs/run has no language model")


def test_a_control_env_of_your_own_is_found_in_the_working_directory(lucidrl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    Path("cli_own_envs.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Own-v0', CartPoleEnv, max_episode_steps=9)\n"
    )
    code, output, errors = lucidrl("check", "--algorithm", "ppo", "env.name=cli_own_envs:Own-v0")
    assert code == 0, errors
    assert "one of 2" in output


def test_a_run_can_generate_resume_and_run_again_from_its_config(lucidrl, workplace):
    name = "ein Lauf é"
    code, output, _ = lucidrl("grpo", *SMALL, f"run.name={name}")
    folder = workplace / "runs" / name
    assert code == 0
    assert str(Path("runs") / name) in output

    code, completion, errors = lucidrl("generate", folder, "2+3=")
    assert (code, errors) == (0, "")
    assert completion.strip().isdigit()
    code, completions, _ = lucidrl("generate", folder, "2+3=", "--samples", 3)
    assert len(completions.splitlines()) == 3
    code, completions, _ = lucidrl("generate", folder, "1+1=", "-", stdin="2+3=\n\n2+2=\r\n")
    assert (code, completions.splitlines()[1]) == (0, completion.strip())
    assert len(completions.splitlines()) == 3

    code, *_ = lucidrl("grpo", "--config", folder / "config.yaml", "run.name=again")
    assert code == 0
    assert without_clock(workplace / "runs/again") == without_clock(folder)

    code, output, _ = lucidrl("grpo", "--resume", folder, "grpo.max_steps=3")
    assert code == 0
    assert [line["step"] for line in without_clock(folder)][-2:] == [3, 3]
    code, output, _ = lucidrl("grpo", "--resume", folder)
    assert "nothing to do: the run already completed and saved step 3 of 3" in output


def test_the_run_uses_the_environment_and_prompts_of_its_check(lucidrl, workplace):
    small = [setting for setting in SMALL if not setting.startswith("env.")]
    code, output, errors = lucidrl("grpo", "env.name=cli_envs:Counted", *small, "run.name=run")
    assert code == 0, errors
    assert Path("events").read_text().split() == ["made", "prompts"]
    [command] = [shlex.split(line) for line in output.splitlines() if line.startswith("  lucidrl generate")]
    assert command[:3] == ["lucidrl", "generate", "runs/run"]
    assert re.fullmatch(r"what's \d\d\+1\?", command[3])
    assert lucidrl(*command[1:])[0] == 0


def test_a_folder_of_an_earlier_version_is_resumed(lucidrl, workplace):
    """Its settings are resolved, readable by all, and lack what came later."""
    assert lucidrl("grpo", *SMALL, "run.name=run")[0] == 0
    path = workplace / "runs/run/config.yaml"
    path.unlink()
    path.write_text((Path(__file__).parent / "recipes/config_of_0.1.0.yaml").read_text())
    code, _, errors = lucidrl("grpo", "--resume", "runs/run", "grpo.max_steps=3")
    assert code == 0, errors
    assert CheckpointManager(workplace / "runs/run/checkpoints").latest().step == 3
    assert "max_steps: 3" in path.read_text()


def test_a_resume_by_the_wrong_command_names_the_right_one(lucidrl, workplace):
    assert lucidrl("grpo", *SMALL, "run.name=run")[0] == 0
    code, _, errors = lucidrl("sft", "--resume", "runs/run")
    assert code == 2
    assert errors == (
        "error: runs/run holds a run of grpo, not of sft; resume it with `lucidrl grpo --resume runs/run`\n"
    )


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(lucidrl, workplace):
    assert lucidrl("grpo", *SMALL, "run.name=run", "checkpoint.every=1")[0] == 0
    weights = workplace / "runs/run/checkpoints/step_2/policy/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert lucidrl("grpo", "--resume", workplace / "runs/run")[0] == 0
    assert [line["step"] for line in without_clock(workplace / "runs/run") if "train/reward" in line] == [1, 2, 2]


@pytest.fixture
def slow_run(workplace):
    """Starts a run whose environment takes `delay_s`; the environment has been called when this returns."""
    started = []

    def start(delay_s: float, steps: int = 50) -> subprocess.Popen[str]:
        settings = [f"env.kwargs={{delay_s: {delay_s}}}", "data.file=short.jsonl", "run.name=run"]
        settings += [
            "collector.prompts_per_step=4",
            "collector.samples_per_prompt=2",
            "validation.num_prompts=0",
            f"grpo.max_steps={steps}",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "lucidrl.cli", "grpo", "env.name=cli_envs:Slow", *settings],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        timeout_at = time.monotonic() + 180
        while not Path("called").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < timeout_at
            time.sleep(0.05)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(signal.SIGINT, "SIGINT", id="Ctrl-C"),
        pytest.param(signal.SIGHUP, "SIGHUP", id="hang-up", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_finishes_the_step_saves_and_can_be_resumed(lucidrl, slow_run, workplace, number, name):
    process = slow_run(delay_s=1.0)
    process.send_signal(number)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert f"{name}: finishing this step, then saving" in output
    checkpoint = CheckpointManager(workplace / "runs/run/checkpoints").latest()
    assert f"stopped after step {checkpoint.step} of 50; the step is saved" in output
    last = checkpoint.step + 1
    code, output, errors = lucidrl("grpo", "--resume", "runs/run", f"grpo.max_steps={last}", "env.kwargs.delay_s=0")
    assert code == 0, errors
    assert CheckpointManager(workplace / "runs/run/checkpoints").latest().step == last


@pytest.mark.slow
def test_ctrl_c_twice_stops_at_once(slow_run):
    process = slow_run(delay_s=50.0)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    for line in process.stdout:
        if "SIGINT" in line:
            break
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert time.monotonic() - start < 40
    assert process.returncode == 130
    assert "interrupted: progress since the last checkpoint is lost" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_run_continues_when_its_output_is_closed(slow_run, workplace):
    process = slow_run(delay_s=0.0, steps=3)
    process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(60) == 0
    assert CheckpointManager(workplace / "runs/run/checkpoints").latest().step == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_last_step_does_not_cut_the_shutdown_short(tmp_path, number):
    events = []
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    class Run:
        @contextmanager
        def loop(self, folder, watcher, resume, callbacks):
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as Ray does
            yield self
            os.kill(os.getpid(), number)
            events.append("shut down")

        def run(self):
            return 7

    display = RunDisplay(SEVEN_STEPS, tmp_path, Console(file=io.StringIO()))
    assert _show_training(Run(), tmp_path, display, False) == 7
    assert events == ["shut down"]
    assert "shutting down, the run is saved" in display.console.file.getvalue()
    signal.signal(signal.SIGTERM, before[1])
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_second_signal_ends_the_shutdown(tmp_path):
    class Run:
        @contextmanager
        def loop(self, folder, watcher, resume, callbacks):
            yield self
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

        def run(self):
            return 7

    with pytest.raises(KeyboardInterrupt):
        _show_training(Run(), tmp_path, RunDisplay(SEVEN_STEPS, tmp_path, Console(file=io.StringIO())), False)
