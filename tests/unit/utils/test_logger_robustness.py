"""Faults of a back end, the disk or the process never stop the run, and losses are logged."""

import json
import logging
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from matplotlib.figure import Figure

from lucidrl.errors import ConfigError
from lucidrl.utils.logger import Logger, LoggerInterface
from lucidrl.utils.logger.background import BackgroundWriter
from tests.tiers import slow_except


class Memory(LoggerInterface):
    """Remembers its calls."""

    def __init__(self):
        self.metrics, self.hyperparams, self.plots, self.num_finished = [], [], [], 0

    def log_metrics(self, metrics, step, prefix="", step_metric=None):
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        self.hyperparams.append(params)

    def log_plot(self, figure, step, name):
        self.plots.append((step, name, figure.get_figwidth()))

    def finish(self):
        self.num_finished += 1


class Raising(Memory):
    num_calls = 0

    def log_metrics(self, metrics, step, prefix="", step_metric=None):
        self.num_calls += 1
        raise ConnectionError("tracker is down")


class Hanging(Memory):
    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def log_metrics(self, metrics, step, prefix="", step_metric=None):
        self.gate.wait()


@pytest.fixture
def cfg(tmp_path):
    return {"log_dir": str(tmp_path / "run"), "finish_timeout_s": 0.5}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def without_costs(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("logger/")}


def run_script(code, *arguments, **kwargs):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, **kwargs)


def test_an_extra_back_end_gets_all_calls_and_one_finish(cfg):
    memory = Memory()
    with Logger(cfg, extra_backends=[memory]) as logger:
        logger.log_hyperparams({"lr": 0.1})
        logger.log_metrics({"a": {"b": torch.tensor(2.0)}}, step=3, prefix="train")
        logger.log_plot(Figure(figsize=(1, 1)), 3, "curve")
    assert [(step, without_costs(metrics)) for step, metrics in memory.metrics] == [(3, {"train/a/b": 2.0})]
    assert (memory.hyperparams, memory.plots, memory.num_finished) == ([{"lr": 0.1}], [(3, "curve", 1.0)], 1)


@pytest.mark.parametrize("backend", [Raising(), Hanging()])
def test_a_back_end_that_raises_or_hangs_does_not_affect_others_and_is_named(cfg, tmp_path, caplog, backend):
    memory = Memory()
    start = time.monotonic()
    with Logger(cfg, extra_backends=[backend, memory]) as logger:
        for step in range(20):
            logger.log_metrics({"x": step}, step)
        assert time.monotonic() - start < 10
    assert time.monotonic() - start < 30
    assert [line["x"] for line in lines(tmp_path / "run")] == list(range(20))
    assert [metrics["x"] for _, metrics in memory.metrics] == list(range(20))
    assert f"{type(backend).__name__} lost 20 of 20 records: steps 0 to 19" in caplog.text
    assert "metrics.jsonl lost" not in caplog.text


@pytest.mark.slow
def test_the_end_of_a_run_does_not_wait_for_a_back_end_that_hung_long_ago(cfg):
    logger = Logger({**cfg, "finish_timeout_s": 2.0}, extra_backends=[Hanging()])
    logger.log_metrics({"x": 1}, 1)
    time.sleep(2.2)
    start = time.monotonic()
    logger.finish()
    assert time.monotonic() - start < 1.8


def test_losses_and_costs_are_metrics_of_the_next_step(cfg, tmp_path):
    raising = Raising()
    with Logger(cfg, extra_backends=[raising]) as logger:
        for step in range(3):
            logger.log_metrics({"x": 1}, step)
            logger.log_metrics({"y": 1}, step)
            while raising.num_calls < 2 * (step + 1):
                time.sleep(0.01)
            time.sleep(0.1)  # until the loss is counted
    first, second, third = (line for line in lines(tmp_path / "run") if "x" in line)
    assert first["logger/lost_records"] == 0
    assert second["logger/lost_records"] == 2
    assert third["logger/lost_records"] == 4
    assert 0 < second["logger/caller_s"] < 10
    assert 0 < second["logger/background_cpu_s"] < 10
    assert not any("logger/caller_s" in line for line in lines(tmp_path / "run") if "y" in line)


def test_later_changes_of_the_metrics_are_not_logged(cfg, tmp_path):
    batch = {"tokens": torch.ones(2, 3), "messages": [[{"content": "a"}], [{"content": "b"}]]}
    metrics = {"curve": torch.zeros(3), "list": [1.0, 2.0], "nested": {"x": 1.0}}
    with Logger(cfg) as logger:
        logger.log_metrics(metrics, 1)
        logger.log_batched_dict_as_jsonl(batch, "rows.jsonl")
        metrics["curve"] += 7
        metrics["list"].clear()
        metrics["nested"]["x"] = 5
        batch["tokens"] += 7
        batch["messages"][0][0]["content"] = "changed"
    (line,) = lines(tmp_path / "run")
    assert (line["curve"], line["list"], line["nested/x"]) == ([0, 0, 0], [1, 2], 1)
    row = json.loads((tmp_path / "run" / "rows.jsonl").read_text().splitlines()[0])
    assert (row["tokens"], row["messages"]) == ([1, 1, 1], [{"content": "a"}])


@pytest.mark.parametrize(
    ("metrics", "step"),
    [(None, 1), ([1, 2], 1), ({"a": 1}, None), ({"a": 1}, "three"), ({"a": 1}, float("nan"))],
)
def test_invalid_metrics_are_one_warning_and_never_an_exception(cfg, caplog, metrics, step):
    with Logger(cfg) as logger:
        logger.log_metrics(metrics, step)
        logger.log_metrics(metrics, step)
    assert len(caplog.records) == 1
    assert "are not logged" in caplog.text


def test_a_warning_about_hyperparameters_names_no_step(cfg, caplog):
    with Logger(cfg) as logger:
        logger.log_hyperparams(3)
    assert "the hyperparameters are not logged: " in caplog.text


class UnspeakableError(Exception):
    def __repr__(self):
        raise RuntimeError("no text")

    __str__ = __repr__


class Measured(float):
    pass


ENDLESS: dict = {}
ENDLESS["again"] = ENDLESS


@pytest.mark.parametrize(
    "value", [ENDLESS, "text", object(), torch.zeros(2, 2), torch.empty(1, device="meta"), 1j, UnspeakableError()]
)
def test_a_value_that_cannot_be_logged_takes_no_other_with_it(cfg, tmp_path, caplog, value):
    with Logger(cfg | {"tensorboard_enabled": True, "finish_timeout_s": 60}) as logger:
        logger.log_metrics({"bad": value, "x": 1, UnspeakableError(): 3}, 2)
    (line,) = lines(tmp_path / "run")
    assert (line["x"], line["<UnspeakableError>"]) == (1, 3)
    assert [record.args[0].split("/")[0] for record in caplog.records] == ["bad"]


def test_numbers_of_unusual_kinds_and_sizes_are_logged(cfg, tmp_path, caplog):
    values = {"own": Measured(0.5), "yes": True, "wide": [-1.7e308, 1.7e308], "huge": [1e200, 1.0]}
    with Logger(cfg | {"tensorboard_enabled": True}) as logger:
        logger.log_metrics(values, 1)
    (line,) = lines(tmp_path / "run")
    assert {name: line[name] for name in values} == values
    assert not caplog.records


def test_a_name_that_occurs_twice_in_a_call_is_a_warning(cfg, tmp_path, caplog):
    with Logger(cfg) as logger:
        logger.log_metrics({"a": {"b": 1}, "a/b": 2}, 1)
    assert lines(tmp_path / "run")[0]["a/b"] == 2
    assert "metric a/b occurs twice in one call" in caplog.text


def test_a_back_end_whose_errors_have_no_repr_continues(cfg, caplog):
    class Odd(Memory):
        def log_metrics(self, metrics, step, prefix="", step_metric=None):
            super().log_metrics(metrics, step)
            if step < 3:
                raise UnspeakableError

    odd = Odd()
    with Logger(cfg, extra_backends=[odd]) as logger:
        for step in range(5):
            logger.log_metrics({"x": 1}, step)
    assert [step for step, _ in odd.metrics] == [0, 1, 2, 3, 4]
    assert odd.num_finished == 1
    assert "Odd lost 3 of 5 records: steps 0 to 2: it raised UnspeakableError (3)" in caplog.text


@pytest.mark.parametrize("name", ["metrics.jsonl", "./config.yaml", "hyperparams.json", "tensorboard/x", "plots/a"])
def test_rows_cannot_replace_what_belongs_to_the_run(cfg, name):
    with Logger(cfg) as logger, pytest.raises(ConfigError, match="the run itself uses the file name"):
        logger.log_batched_dict_as_jsonl({"a": [1]}, name)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", None, 3])
def test_a_name_that_no_file_can_have_is_refused(cfg, name):
    with Logger(cfg) as logger, pytest.raises(ConfigError, match=r"cannot be used|leaves the log folder"):
        logger.log_batched_dict_as_jsonl({"a": [1]}, name)


def test_an_interrupted_finish_logs_the_losses_and_closes_the_rest(tmp_path):
    code = """
import signal, sys, threading, time, os
from lucidrl.utils.logger import Logger, LoggerInterface
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow(LoggerInterface):
    def log_metrics(self, metrics, step, prefix="", step_metric=None): time.sleep(60)
    def log_hyperparams(self, params): pass
logger = Logger({"log_dir": sys.argv[1]}, extra_backends=[Slow()])
for step in range(10): logger.log_metrics({"x": 1}, step)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    logger.finish()
except KeyboardInterrupt:
    print("interrupted")
"""
    result = run_script(code, tmp_path)
    assert result.stdout == "interrupted\n"
    assert len(lines(tmp_path)) == 10
    assert "Slow lost 10 of 10 records: steps 0 to 9" in result.stderr


def test_a_forked_process_records_nothing_and_warns(tmp_path):
    code = (
        START
        + """
import os
logger.log_metrics({"x": 0}, 0)
if os.fork() == 0:
    logger.log_metrics({"x": 1}, 1)
    logger.finish()
    sys.exit()
os.wait()
logger.log_metrics({"x": 2}, 2)
"""
    )
    result = run_script(code, tmp_path)
    assert [line["x"] for line in lines(tmp_path)] == [0, 2]
    assert result.stderr.count("the logger is finished and records nothing more") == 1


@pytest.mark.slow
def test_a_short_program_that_forgets_to_finish_loses_nothing_of_any_tracker(tmp_path):
    code = """
import sys
from lucidrl.utils.logger import Logger
logger = Logger({"log_dir": sys.argv[1], "tensorboard_enabled": True, "trackio_enabled": True, "finish_timeout_s": 30})
for step in range(10): logger.log_metrics({"x": step}, step)
"""
    result = run_script(code, tmp_path)
    assert "lost" not in result.stderr
    assert len(lines(tmp_path)) == 10


def test_a_slow_disk_costs_the_caller_little(cfg):
    class SlowDisk(Memory):
        def log_metrics(self, metrics, step, prefix="", step_metric=None):
            time.sleep(0.2)

    writer = BackgroundWriter("disk", SlowDisk, capacity=5, max_wait_s=0.002)
    start = time.monotonic()
    for step in range(200):
        writer.put(lambda backend: backend.log_metrics({}, 0), step)
    assert time.monotonic() - start < 20
    writer.close()
    writer.join(until_s=0.0, timeout_s=0.0)


def test_a_value_that_is_no_number_is_one_warning_for_all_back_ends(cfg, caplog):
    with Logger(cfg | {"tensorboard_enabled": True}, extra_backends=[Memory()]) as logger:
        for step in range(3):
            logger.log_metrics({"name": "text", "picture": torch.zeros(2, 2), "x": 1}, step, prefix="train")
    assert [record.args[0] for record in caplog.records] == ["train/name", "train/picture"]


@pytest.mark.parametrize(("steps", "warning"), [((5, 5, 5, 5), "twice"), ((5, 3, 2), "step 3 was logged after step 5")])
def test_a_step_that_repeats_or_goes_back_is_kept_with_one_warning(cfg, tmp_path, caplog, steps, warning):
    with Logger(cfg | {"tensorboard_enabled": True}) as logger:
        for number, step in enumerate(steps):
            logger.log_metrics({"x": number}, step)
            logger.log_metrics({"other": number}, 100 + number)
    assert [line["x"] for line in lines(tmp_path / "run") if "x" in line] == list(range(len(steps)))
    assert len(caplog.records) == 1
    assert warning in caplog.text


@pytest.mark.slow
def test_a_tight_loop_loses_no_line(cfg, tmp_path):
    with Logger(cfg) as logger:
        for step in range(20_000):
            logger.log_metrics({"x": step}, step)
    assert [line["x"] for line in lines(tmp_path / "run")] == list(range(20_000))


def test_changed_settings_of_a_resumed_run_are_shown(cfg, caplog, tmp_path):
    for rate in (0.1, 0.2):
        with Logger(cfg) as logger:
            logger.log_hyperparams({"optimizer": {"lr": rate}, "seed": 0, "api_key": "abcdefgh"})
    assert "settings changed since the run was last started: optimizer.lr: 0.1 -> 0.2" in caplog.text
    recorded = json.loads((tmp_path / "run" / "hyperparams.json").read_text())
    assert recorded == {"optimizer.lr": 0.2, "seed": 0, "api_key": "<redacted>"}


def test_secrets_reach_no_back_end(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "s3cr3t-of-the-environment")
    memory = Memory()
    with Logger(cfg | {"tensorboard_enabled": True}, extra_backends=[memory]) as logger:
        logger.log_hyperparams({"llm_judge": {"password": "s3cr3t-password", "url": "x?k=s3cr3t-of-the-environment"}})
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"s3cr3t" not in written
    assert "s3cr3t" not in repr(memory.hyperparams)


CURVES = {
    "generation_logprobs": torch.log(torch.full((2, 4), 0.5)),
    "prev_logprobs": torch.log(torch.tensor([[0.5, 0.5, 0.25, 0.5], [0.5] * 4])),
    "token_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]),
    "sample_mask": torch.ones(2),
    "prompt_lengths": torch.tensor([1, 2]),
    "full_lengths": torch.tensor([4, 4]),
}


def test_the_worst_sample_is_plotted_into_the_run_folder_and_every_tracker(cfg, tmp_path):
    memory = Memory()
    with Logger(cfg | {"finish_timeout_s": 20}, extra_backends=[memory]) as logger:
        logger.log_plot_token_mult_prob_error(CURVES, 7, "train/token_mult_prob_error")
    assert [plot[:2] for plot in memory.plots] == [(7, "train/token_mult_prob_error")]
    (picture,) = (tmp_path / "run" / "plots" / "train").iterdir()
    assert picture.name == "token_mult_prob_error_7.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_plot_is_logged_with_the_reason(cfg, tmp_path, caplog):
    with Logger(cfg) as logger:
        logger.log_plot_token_mult_prob_error(CURVES | {"sample_mask": torch.zeros(2)}, 7, "error")
    assert "plot error of step 7 is skipped: " in caplog.text
    assert not (tmp_path / "run" / "plots").exists()


def test_without_ray_the_names_of_machine_metrics_do_not_contain_ray(cfg, tmp_path):
    with Logger(cfg | {"monitor_gpus": True, "gpu_monitoring": {"collection_interval": 0.1, "flush_interval": 0.1}}):
        time.sleep(0.5)
    monitored = [line for line in lines(tmp_path / "run") if "machine/node.0.mem_gb" in line]
    assert len(monitored) >= 2
    seconds = [line["machine/elapsed_s"] for line in monitored]
    assert seconds == sorted(set(seconds))
    assert all(0 < line["machine/node.0.mem_gb"] <= line["machine/node.0.mem_total_gb"] for line in monitored)
    assert not [name for line in monitored for name in line if "ray" in name]


def test_a_figure_is_drawn_once_for_all_back_ends(cfg, tmp_path, monkeypatch):
    figure, drawings = Figure(figsize=(1, 1)), []
    savefig = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda *args, **kwargs: (drawings.append(1), savefig(*args, **kwargs)))
    with Logger(cfg | {"tensorboard_enabled": True}) as logger:
        logger.log_plot(figure, 3, "curve")
    assert (tmp_path / "run" / "plots" / "curve_3.png").read_bytes().startswith(b"\x89PNG")
    assert drawings == [1]


def test_a_missing_package_is_refused_at_once(cfg, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r'tracking by wandb needs the package wandb; pip install "lucidrl\[wandb\]"'):
        Logger(cfg | {"wandb_enabled": True})


START = """
import sys, time
from lucidrl.utils.logger import Logger
logger = Logger({"log_dir": sys.argv[1]})
"""


@pytest.mark.parametrize("ending", ["pass", "raise RuntimeError('broken')", "sys.exit(3)"])
def test_a_process_that_forgets_to_finish_loses_nothing(tmp_path, ending):
    code = START + f"for step in range(500): logger.log_metrics({{'x': step}}, step)\n{ending}"
    run_script(code, tmp_path)
    assert len(lines(tmp_path)) == 500


def test_ctrl_c_loses_nothing(tmp_path):
    code = START + "step = 0\nwith logger:\n  while True:\n    logger.log_metrics({'x': step}, step); step += 1\n"
    code += "    if step == 500: print('ready', flush=True); time.sleep(60)"
    # Also where the tests run in the background of a shell, which has their processes ignore the signal.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.wait(20)
    finally:
        process.kill()
    assert [line["x"] for line in lines(tmp_path)] == list(range(500))


@pytest.mark.parametrize("seed", slow_except(range(3), 0))
def test_kill_9_at_any_moment_leaves_whole_lines_and_all_but_the_last_second(tmp_path, seed):
    code = START + "print('ready', flush=True)\nstep = 0\nwhile True:\n"
    code += "    logger.log_metrics({'t': time.time(), **{f'm{i}': i / 3 for i in range(50)}}, step); step += 1"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(random.Random(seed).uniform(0.3, 1.5))
    killed = time.time()
    process.kill()
    process.wait(20)
    whole = (tmp_path / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
    records = [json.loads(line) for line in whole]
    assert [record["step"] for record in records] == list(range(len(records)))
    assert records[-1]["t"] > killed - 1


def test_a_full_disk_leaves_whole_lines_and_the_loss_is_named(tmp_path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n" + START
    code += "for step in range(1000): logger.log_metrics({'x': step}, step)\nlogger.finish()\nprint('trained')"
    result = run_script(code, tmp_path)
    assert result.stdout == "trained\n"
    kept = lines(tmp_path)
    assert 50 < len(kept) < 1000
    assert [line["x"] for line in kept] == list(range(len(kept)))
    assert f"metrics.jsonl lost {1000 - len(kept)} of 1000 records: steps {len(kept)} to 999" in result.stderr
    assert "File too large" in result.stderr


@pytest.mark.slow
def test_a_process_with_a_hanging_back_end_ends_at_its_normal_time(tmp_path):
    code = """
import sys, time
from lucidrl.utils.logger import Logger, LoggerInterface
class Hanging(LoggerInterface):
    def log_metrics(self, metrics, step, prefix="", step_metric=None): time.sleep(3600)
    def log_hyperparams(self, params): pass
start = time.monotonic()
with Logger({"log_dir": sys.argv[1], "finish_timeout_s": 1}, extra_backends=[Hanging()]) as logger:
    for step in range(3): logger.log_metrics({"x": 1}, step)
print(time.monotonic() - start)
"""
    result = run_script(code, tmp_path)
    assert result.returncode == 0
    assert float(result.stdout) < 3
    assert "Hanging lost 3 of 3 records: steps 0 to 2: not written within 1 s (3)" in result.stderr


def test_threads_may_log_at_the_same_time(cfg, tmp_path):
    with Logger(cfg) as logger:

        def log_some(number):
            for step in range(200):
                logger.log_metrics({f"thread_{number}": step}, step)

        threads = [threading.Thread(target=log_some, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = lines(tmp_path / "run")
    for number in range(4):
        name = f"thread_{number}"
        assert [record[name] for record in records if name in record] == list(range(200))


def test_warnings_go_through_logging(cfg, caplog):
    with caplog.at_level(logging.WARNING), Logger(cfg, extra_backends=[Raising()]) as logger:
        logger.log_metrics({"x": 1}, 1)
    assert {record.name.split(".")[0] for record in caplog.records} == {"lucidrl"}
