"""What an offline run of Weights & Biases holds on disk, and what happens when there is no server."""

import inspect
import json
import logging
import math
import os
import pty
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import wandb
from matplotlib.figure import Figure
from wandb.proto.wandb_internal_pb2 import Record

from lucidrl.errors import ConfigError
from lucidrl.recipes.tracking import TrackingConfig, WandbTracking
from lucidrl.utils.logger import Logger
from lucidrl.utils.logger.config import WandbConfig
from lucidrl.utils.logger.wandb import WandbLogger, _init_arguments


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run_a" / "wandb"


@pytest.fixture
def make(folder):
    """Makes offline loggers."""
    loggers = []

    def make(**cfg):
        loggers.append(WandbLogger({"mode": "offline", **cfg}, log_dir=str(folder)))
        return loggers[-1]

    yield make
    for logger in loggers:
        logger.finish()


@pytest.fixture
def logger(make):
    return make()


def parsed(data):
    """Records of a `.wandb` file: after 7 bytes, blocks of 32 KiB with chunks of (checksum, size, kind, data)."""
    position, parts = 7, b""
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def records(logger):
    """Everything that the run wrote; W&B's service writes the end of it a moment after `finish`."""
    logger.finish()
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        (file,) = Path(logger.run.dir).parent.glob("*.wandb")
        found = list(parsed(file.read_bytes()))
        if found and found[-1].HasField("exit"):
            return found
        time.sleep(0.02)
    raise AssertionError("the run was not written to its end")


def history(logger):
    """What was logged, record by record, without W&B's own fields."""
    rows = []
    for record in records(logger):
        if record.HasField("history"):
            row = {}
            for item in record.history.item:
                *path, last = item.nested_key
                place = row
                for key in path:
                    place = place.setdefault(key, {})
                place[last] = json.loads(item.value_json)
            rows.append({name: value for name, value in row.items() if not name.startswith("_")})
    return rows


def axes(logger):
    """Step metric of each definition, in order."""
    defined = [record.metric for record in records(logger) if record.HasField("metric")]
    return [(metric.name or metric.glob_name, metric.step_metric) for metric in defined]


def config(logger):
    updates = [update for record in records(logger) for update in record.config.update]
    return {update.key: json.loads(update.value_json) for update in updates}


def test_scalars_of_every_kind_arrive_with_their_step(logger):
    logger.log_metrics({"reward": 0.5, "ok": True, "t": torch.tensor(3), "deep": {"x": 2}}, step=4, prefix="train")
    assert history(logger) == [
        {"train/reward": 0.5, "train/ok": True, "train/t": 3, "train/deep/x": 2, "step": 4},
    ]


def test_numbers_that_are_not_finite_are_kept(logger):
    logger.log_metrics({"nan": float("nan"), "inf": float("inf"), "minus": float("-inf")}, step=1)
    (row,) = history(logger)
    assert math.isnan(row["nan"])
    assert (row["inf"], row["minus"]) == (math.inf, -math.inf)


def test_steps_may_repeat_and_go_back(logger):
    for step, value in [(5, 1), (5, 2), (3, 3)]:
        logger.log_metrics({"x": value}, step)
    assert history(logger) == [{"x": 1, "step": 5}, {"x": 2, "step": 5}, {"x": 3, "step": 3}]


def test_everything_is_plotted_against_the_step_unless_there_is_a_step_metric(logger):
    logger.log_metrics({"loss": 1}, step=7)
    for seconds in (30, 40):
        logger.log_metrics({"x": 1, "ray/ray_step": seconds}, step=2, prefix="ray", step_metric="ray/ray_step")
    # W&B adds where the run was, as the last record of a step told it.
    assert history(logger)[2] == {"ray/x": 1, "ray/ray_step": 40, "step": 7}
    assert axes(logger) == [("*", "step"), ("ray/x", "ray/ray_step")]


def test_definitions_are_passed_on(logger):
    logger.define_metric("val/*", "val/epoch")
    assert axes(logger)[1:] == [("val/*", "val/epoch")]


@pytest.mark.parametrize("values", [[1.0, 2.0, 2.0, math.nan], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0 + 2**-52], [1e20] * 3])
def test_lists_become_histograms_of_their_finite_values(logger, values):
    logger.log_metrics({"h": values, "none": [math.inf]}, step=1)
    (row,) = history(logger)
    assert set(row) == {"h", "step"}
    assert row["h"]["_type"] == "histogram"
    assert sum(row["h"]["values"]) == 3


def test_metrics_that_cannot_be_logged_are_one_warning(logger, caplog):
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            logger.log_metrics({"text": "hello", "step": 7, "x": 1.0}, step)
    assert len(caplog.records) == 2
    assert history(logger) == [{"x": 1.0, "step": step} for step in range(3)]


def test_hyperparameters_are_nested_and_without_secrets(logger):
    logger.log_hyperparams({"policy": {"lr": 1e-4, "layers": [1, None]}, "llm_judge": {"api_key": "sk-12345678"}})
    content = config(logger)
    assert content["policy"] == {"lr": 1e-4, "layers": [1, None]}
    assert content["llm_judge"] == {"api_key": "<redacted>"}


def test_every_argument_that_wandb_documents_is_a_setting_of_the_logger_and_of_a_run():
    documented = inspect.signature(wandb.init).parameters.keys() - {"anonymous"}  # which wandb no longer uses
    assert WandbConfig.__annotations__.keys() == documented | {"log_code", "log_diffs"}


def test_every_argument_is_a_setting_and_another_one_is_refused():
    assert WandbTracking.model_fields.keys() <= WandbConfig.__annotations__.keys() | {"enabled"}
    given = {"group": "g", "tags": ["a"], "save_code": True, "settings": {"program": "x"}, "resume": "must"}
    tracking = TrackingConfig.model_validate({"wandb": {**given, "notes": None}})
    assert given.items() <= tracking.logger_config(Path("run"))["wandb"].items()
    assert "notes" not in tracking.logger_config(Path("run"))["wandb"]
    for wrong, said in (({"grup": "g"}, "did you mean group"), ({"tags": 3}, "tags=3 is not valid")):
        with pytest.raises(ValueError, match=said):
            WandbTracking.model_validate(wrong)


def test_arguments_and_hyperparameters_reach_wandb_beside_the_config(make):
    logger = make(
        group="g", tags=["a", "b"], notes="why", job_type="train", entity="team", project="p", name="n",
        config={"site": {"rack": 3, "api_key": "sk-12345678"}, "lr": "overruled"}, settings={"program": "main.py"},
    )  # fmt: skip
    logger.log_hyperparams({"lr": 0.1, "policy": {"x": 1}})
    (run,) = [record.run for record in records(logger) if record.HasField("run")]
    assert (run.run_group, list(run.tags), run.notes, run.job_type) == ("g", ["a", "b"], "why", "train")
    assert (run.entity, run.project, run.display_name) == ("team", "p", "n")
    start = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert start["site"] == {"rack": 3, "api_key": "<redacted>"}
    assert {key: config(logger)[key] for key in ("lr", "policy")} == {"lr": 0.1, "policy": {"x": 1}}
    assert logger.run.settings.program == "main.py"
    assert logger.run.settings.silent  # ours stay beside it


def test_user_settings_override_ours(make):
    assert make(settings={"console": "wrap"}).run.settings.console == "wrap"
    assert make(settings=wandb.Settings(console="wrap")).run.settings.console == "wrap"


@pytest.mark.parametrize(
    ("cfg", "complaint"),
    [
        ({"grupp": "x"}, r"unknown key WandbConfig.grupp; did you mean WandbConfig.group\?"),
        ({"job-type": "x"}, r"did you mean WandbConfig.job_type\?"),
        ({"tags": "x"}, "WandbConfig.tags='x' is not valid"),
        (
            {"settings": {"consol": "off"}},
            r"settings\.consol; did you mean WandbConfig\.settings\.console\?",
        ),
        ({"settings": 3}, "settings must be a mapping"),
    ],
)
def test_wrong_arguments_are_refused_with_a_suggestion(make, cfg, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make(**cfg)


def test_a_run_that_is_rewound_or_forked_is_not_resumed_by_its_id_as_well():
    rewound = _init_arguments({"resume_from": "old?_step=3", "id": "mine"}, None)
    forked = _init_arguments({"fork_from": "old?_step=3", "id": "mine"}, None)
    assert (rewound["id"], rewound["resume"]) == (None, None)
    assert (forked["id"], forked["resume"]) == ("mine", None)


@pytest.mark.slow
def test_a_run_of_the_same_id_is_continued_also_with_another_config(make, folder):
    for value in (1, 2):
        logger = make(id="the-id")
        logger.log_hyperparams({"lr": value})
        logger.log_hyperparams({"lr": {"now": "nested"}})
        logger.log_metrics({"x": value}, step=value)
        (run,) = [record.run for record in records(logger) if record.HasField("run")]
        assert (run.run_id, run.resume, run.display_name, run.project) == ("the-id", True, "run_a", "lucidrl")
        assert folder in Path(logger.run.dir).parents
        time.sleep(1)  # W&B names its folders by the second


def test_a_figure_becomes_an_image(logger):
    logger.log_plot(Figure(figsize=(1, 1)), step=9, name="plots/errors")
    (row,) = history(logger)
    assert (row["step"], row["plots/errors"]["_type"]) == (9, "image-file")
    assert (Path(logger.run.dir) / row["plots/errors"]["path"]).read_bytes().startswith(b"\x89PNG")


def test_machine_command_line_and_packages_are_not_sent(logger):
    kinds = {record.WhichOneof("record_type") for record in records(logger)}
    assert not kinds & {"environment", "stats", "files", "output", "output_raw"}
    assert list(Path(logger.run.dir).iterdir()) == []


def test_the_users_own_cache_of_artifacts_stays_where_it_is(make, monkeypatch):
    monkeypatch.delenv("WANDB_CACHE_DIR", raising=False)
    make()
    assert "WANDB_CACHE_DIR" not in os.environ
    monkeypatch.setenv("WANDB_CACHE_DIR", "mine")
    make()
    assert os.environ["WANDB_CACHE_DIR"] == "mine"


def test_finish_may_be_called_twice(logger):
    logger.finish()
    logger.finish()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'needs the package wandb; pip install "lucidrl\[wandb\]"'):
        WandbLogger({})


def test_a_refusal_of_wandb_is_a_config_error(make):
    with pytest.raises(ConfigError, match="W&B refuses the run"):
        make(id="no/slash")


@pytest.fixture
def work_tree(tmp_path, monkeypatch):
    """A repository with a file that may be kept, and one of every kind that may not."""
    root = tmp_path / "repository" / "project"
    (root / "src").mkdir(parents=True)
    (tmp_path / "outside.py").write_text("outside")
    for name in ("src/main.py", "src/gone.py", "../above.py", ".env.local", "id_rsa", "deploy.pem", "my_credentials/a"):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("first\n")
    (root / "data.bin").write_bytes(b"\0\1")
    (root / "latin.txt").write_bytes(b"\xe9")
    (root / "large.txt").write_text("x" * 1_000_001)
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], cwd=root.parent, check=True)
    (root / "untracked.py").write_text("untracked")
    monkeypatch.chdir(root)
    return root


def kept_files(logger):
    """Files that the run registered for sending, by their content."""
    names = [file.path for record in records(logger) for file in record.files.files]
    return {name: (Path(logger.run.dir) / name).read_bytes() for name in names}


def test_code_is_the_tracked_text_without_secrets(make, work_tree):
    logger = make(log_code=True)
    (work_tree / "src" / "main.py").write_text("later")
    assert kept_files(logger) == {"code/src/main.py": b"first\n", "code/src/gone.py": b"first\n"}


def test_diffs_are_of_the_same_files(make, work_tree):
    for name in ("src/main.py", ".env.local", "id_rsa", "../above.py", "my_credentials/a"):
        (work_tree / name).write_text("second\n")
    (work_tree / "src" / "gone.py").unlink()
    (work_tree / "link.py").unlink()
    (work_tree / "link.py").symlink_to("src/main.py")
    files = kept_files(make(log_diffs=True))
    assert list(files) == ["diff.patch"]
    lines = files["diff.patch"].decode().splitlines()
    assert [line for line in lines if line.startswith("diff")] == [
        "diff --git a/src/gone.py b/src/gone.py",
        "diff --git a/src/main.py b/src/main.py",
    ]
    assert [line for line in lines if line in ("-first", "+second")] == ["-first", "+second"]


def test_without_changes_there_is_no_diff(make, work_tree):
    assert kept_files(make(log_diffs=True)) == {}


def test_outside_of_a_repository_there_is_one_warning(make, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert kept_files(make(log_code=True, log_diffs=True)) == {}
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("lucidrl")]
    assert message.startswith("the code is not saved with the run: git cannot read")


def environment(tmp_path, **changes):
    """Ours without W&B's variables and credentials."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return plain | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "TERM": "xterm"} | changes


IN_A_THREAD = """
import sys, threading
from lucidrl.utils.logger.wandb import WandbLogger

def work():
    logger = WandbLogger({"mode": sys.argv[1], "id": "a"}, log_dir=sys.argv[2])
    logger.log_metrics({"x": 1}, 1)
    logger.finish()

thread = threading.Thread(target=work, daemon=True)
thread.start()
thread.join(float(sys.argv[3]))
sys.exit(3 if thread.is_alive() else 0)
"""


@pytest.fixture
def silent_server():
    """A server that accepts connections and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def url_of(server):
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_offline_run_works_silently_in_a_thread_within_its_folder_without_network(tmp_path, silent_server):
    command = [sys.executable, "-c", IN_A_THREAD, "offline", str(tmp_path / "run" / "wandb"), "30"]
    env = environment(tmp_path, WANDB_BASE_URL=url_of(silent_server), WANDB_API_KEY="a" * 40)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    silent_server.setblocking(False)
    with pytest.raises(BlockingIOError):
        silent_server.accept()


@pytest.mark.slow
def test_a_server_that_does_not_reply_does_not_block_the_exit(tmp_path, silent_server):
    begin = time.monotonic()
    processes = []
    for number, url in enumerate(["http://127.0.0.1:9", url_of(silent_server)]):
        env = environment(tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY="a" * 40)
        command = [sys.executable, "-c", IN_A_THREAD, "online", str(tmp_path / str(number) / "wandb"), "2"]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
    assert [process.wait(timeout=60) for process in processes] == [3, 3]
    assert time.monotonic() - begin < 80  # 8 s on an idle machine; wandb by itself would take more than 90 s


@pytest.mark.slow
def test_a_run_whose_server_cannot_be_reached_stays_on_disk(tmp_path):
    env = environment(tmp_path, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="a" * 40, WANDB_INIT_TIMEOUT="1")
    command = [sys.executable, "-c", IN_A_THREAD, "online", str(tmp_path / "run" / "wandb"), "30"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "W&B cannot be reached, the run stays on disk; send it later with `wandb sync --id a " in done.stderr
    (file,) = (tmp_path / "run" / "wandb").glob("wandb/offline-run-*/*.wandb")
    assert any(record.HasField("history") for record in parsed(file.read_bytes()))


@pytest.mark.slow
def test_wandb_never_prompts_for_a_key_even_on_a_terminal(tmp_path):
    code = """
import sys
from lucidrl.utils.logger.wandb import WandbLogger
assert sys.stdin.isatty() and sys.stderr.isatty()
WandbLogger({}, log_dir=sys.argv[1])
"""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "wandb")],
        env=environment(tmp_path), stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    assert process.wait(timeout=60) == 1
    output = os.read(ours, 65536).decode()
    os.close(ours)
    assert "ConfigError: W&B refuses the run (No API key configured" in output
    assert "WANDB_API_KEY" in output
    assert "tracking.wandb.mode=offline" in output


def test_samples_are_tables(folder):
    logger = Logger({"log_dir": str(folder.parent), "wandb_enabled": True, "wandb": {"mode": "offline"}})
    samples = {
        "sample": ["a#0", "a#1"],
        "messages": [
            [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
            [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user", "assistant")],
        ],
        "reward": [1.0, 0.0],
        "truncated": [False, True],
    }
    logger.log_samples(samples, 1, "step")
    logger.finish()
    (folder.parent / "samples/step_1.jsonl").read_text()
    [table] = (folder.parent / "wandb").glob("**/media/table/samples/*.table.json")
    assert json.loads(table.read_text()) == {
        "columns": ["sample", "prompt", "completion", "reward", "truncated"],
        "data": [
            ["a#0", "1+1=", "2", 1.0, False],
            ["a#1", "system: s\nuser: u", "assistant: a\nuser: u\nassistant: a", 0.0, True],
        ],
    }
