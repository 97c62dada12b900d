"""The terminal shows text literally, and log records once."""

import logging
import os
import random
import re
import subprocess
import sys
import time

import pytest
import torch

import lucidrl.utils.logger as logger_package
from lucidrl.errors import ConfigError, DataError
from lucidrl.utils.logger import configure_rich_logging, console, print_message_log_samples


def one_message(text, role="user"):
    return [{"role": role, "content": text}]


def test_markup_and_escape_codes_are_printed_literally(capsys):
    text = "[/INST] [bold]x[/bold] :smile: \x1b[31mred\x1b[0m \x9b2J \u202eevil bell\x07 \ud800"
    print_message_log_samples([one_message(text, role="[red]user")], [1.0])
    out = capsys.readouterr().out
    assert "[/INST] [bold]x[/bold] :smile: ␛[31mred␛[0m" in out
    assert "[red]user" in out
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(out)


def test_long_text_keeps_its_beginning_and_end(capsys):
    print_message_log_samples([one_message("BEGIN" + "x" * 50_000 + "END")], [1.0])
    out = capsys.readouterr().out
    assert "BEGIN" in out
    assert "END" in out
    assert "characters" in out
    assert len(out) < 3000


def test_best_and_worst_are_shown_with_statistics_of_all(capsys):
    logs = [one_message(f"sample-{i}-") for i in range(20)]
    print_message_log_samples(logs, [float(i) for i in range(20)], num_samples=3, step=7)
    out = capsys.readouterr().out
    assert "Step 7: 20 samples, reward mean 9.5, std 5.766, min 0, max 19" in out
    assert out.index("sample-19-") < out.index("sample-0-")
    assert out.count("sample-") == 3


def test_rewards_that_are_not_finite_are_counted_apart_and_never_best(capsys):
    logs = [one_message(name) for name in ("nan-one", "good-one", "bad-one")]
    print_message_log_samples(logs, [float("nan"), 1.0, 0.0], num_samples=1)
    out = capsys.readouterr().out
    assert "reward mean 0.5" in out
    assert "1 not finite" in out
    assert "good-one" in out
    assert "nan-one" not in out


@pytest.mark.parametrize("largest", [1e308, 1.7e308])
def test_bins_of_enormous_rewards_start_at_finite_numbers(capsys, largest):
    rewards = [largest * (k / 10 - 1) for k in range(21)]
    print_message_log_samples([one_message("x")] * 21, rewards, num_samples=0)
    starts = [float(start) for start in re.findall(r"from (\S+)", capsys.readouterr().out)]
    assert starts == pytest.approx([largest * (k / 5 - 1) for k in range(10)], rel=1e-3, abs=largest * 1e-9)


@pytest.mark.parametrize("num_samples", range(8))
def test_the_requested_number_of_different_samples_is_chosen(num_samples):
    chosen = console._spread_by_reward([0.5, 0.1, 0.9, 0.3, 0.2], num_samples)
    assert len(set(chosen)) == len(chosen) == min(num_samples, 5)


def test_no_samples_is_no_error(capsys):
    print_message_log_samples([], [])
    assert "0 samples" in capsys.readouterr().out


def test_a_missing_reward_is_refused():
    with pytest.raises(DataError, match="2 message logs came with 1 rewards"):
        print_message_log_samples([[], []], [1.0])


def test_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(DataError, match="one number per sample"):
        print_message_log_samples([[], []], [1.0, None])


def test_rewards_may_be_a_tensor(capsys):
    print_message_log_samples([one_message("a"), one_message("b")], torch.tensor([0.25, 0.75], dtype=torch.bfloat16))
    assert "reward mean 0.5" in capsys.readouterr().out


def test_the_best_and_the_worst_are_named(capsys):
    logs = [one_message("x") for _ in range(5)]
    print_message_log_samples(logs, [0.1, 0.9, 0.5, 0.0, 0.3], num_samples=3)
    out = capsys.readouterr().out
    assert "best sample 1, reward 0.9" in out
    assert " sample 4, reward 0.3" in out
    assert "worst sample 3, reward 0" in out
    print_message_log_samples(logs, [0.5] * 5)
    out = capsys.readouterr().out
    assert "best" not in out
    assert "worst" not in out


def counted(rewards, width=80):
    """Counts of the histogram's lines."""
    return [int(line.split()[-1]) for line in console._histogram(rewards, width)]


def test_the_histogram_counts_every_finite_reward_in_few_lines():
    assert counted([0.0, 1.0, 1.0, 0.0, 1.0]) == [2, 3]
    assert counted([k / 1000 for k in range(1000)]) == [100] * 10
    assert counted([float("nan"), float("inf"), 1.0, 2.0, 2.0]) == [1, 2]
    assert counted([-1e308, 1e308, 1e308]) == [1, 2]
    assert sum(counted([random.gauss(0, 1) for _ in range(500)])) == 500


@pytest.mark.parametrize("rewards", [[], [1.0], [2.0, 2.0], [float("nan")], [5e-324, 0.0]])
def test_rewards_without_a_spread_need_no_histogram(rewards, capsys):
    assert console._histogram(rewards, 80) == []
    print_message_log_samples([one_message("x")] * len(rewards), rewards)
    assert f"{len(rewards)} samples" in capsys.readouterr().out


def test_statistics_of_huge_and_of_many_rewards_are_right():
    assert "mean 0, std 1e+308" in console._statistics([-1e308, 1e308])
    start = time.perf_counter()
    many = [float(k) for k in range(200_000)]
    console._statistics(many)
    console._histogram(many, 80)
    assert time.perf_counter() - start < 20


def test_zero_width_and_separator_characters_are_made_visible(capsys):
    hidden = "\u200b\u200d\u2060\ufeff\u202d\u2028\u2029\u061c\xad\x85"
    print_message_log_samples([one_message(f"a{hidden}b 漢字 \ud83d")], [1.0])
    out = capsys.readouterr().out
    assert "\\u200b" in out
    assert "\\ud83d" in out
    assert "漢字" in out
    assert not set(hidden) & set(out)


def test_content_in_parts_is_shown_as_its_text(capsys):
    parts = [{"type": "text", "text": "look at"}, {"type": "image_url", "image_url": {"url": "data:..."}}, "[/]"]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "tool"}, {}]
    print_message_log_samples([[*messages, {"role": "user", "content": {"a": 1}}]], [1.0])
    out = capsys.readouterr().out
    for text in ("look at", "<image_url>", "[/]", "assistant:", "tool:", "unknown:", "{'a': 1}"):
        assert text in out
    assert "None" not in out
    assert "data:" not in out


def test_of_many_messages_the_first_and_the_last_are_shown(capsys):
    print_message_log_samples([[{"role": "user", "content": f"message-{i}-"} for i in range(1000)]], [1.0])
    out = capsys.readouterr().out
    assert out.count("message-") == 20
    assert "message-0-" in out
    assert "message-999-" in out
    assert "980 messages" in out


def test_roles_have_different_colors(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    roles = ["system", "user", "assistant", "environment", "critic"]
    print_message_log_samples([[{"role": role, "content": "x"} for role in roles]], [1.0])
    out = capsys.readouterr().out
    colors = {re.search(rf"\x1b\[([\d;]+)m{role}:", out)[1] for role in roles}
    assert len(colors) == len(roles)


@pytest.mark.parametrize("columns", ["1", "5", "20"])
def test_narrow_terminals_are_filled_and_not_exceeded(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    logs = [one_message(f"text of {i} " * 10) for i in range(30)]
    print_message_log_samples(logs, [i - 7.123456 for i in range(30)])
    lines = capsys.readouterr().out.splitlines()
    if columns == "20":
        assert max(map(len, lines)) == 20
        assert "best sample 29" in "".join(lines)


PRINT_ONE = """
import sys
from lucidrl.utils.logger.console import print_message_log_samples
for _ in range(3):
    print_message_log_samples([[{"role": "user", "content": "caf\u00e9"}], []], [0.0, 1.0])
print("still running", file=sys.stderr)
sys.stderr.flush()
"""


def test_a_terminal_of_another_encoding_shows_what_it_can():
    result = subprocess.run(
        [sys.executable, "-c", PRINT_ONE],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert b"user: caf?" in result.stdout


def test_a_closed_pipe_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-c", PRINT_ONE], check=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert b"still running" in result.stderr


def test_a_log_record_to_a_closed_pipe_does_not_end_the_run():
    code = """
import logging
from lucidrl.utils.logger import configure_rich_logging
configure_rich_logging()
for _ in range(3):
    logging.warning("x")
print("still running")
"""
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    closed = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" 2>&-', sys.executable, code], check=False, stdout=subprocess.PIPE
    )
    assert [(done.returncode, done.stdout) for done in (gone, closed)] == [(0, b"still running\n")] * 2


def test_rich_logging_is_configured_once_and_sets_the_flag():
    code = """
import logging
import lucidrl.utils.logger as package
logging.basicConfig()
assert package._rich_logging_configured is False
for _ in range(2):
    package.configure_rich_logging("warning", show_time=False, show_path=False)
assert package._rich_logging_configured is True
logging.getLogger("x").info("hidden")
logging.getLogger("louder").setLevel("INFO")
logging.getLogger("louder").info("also hidden")
logging.getLogger("x").warning("shown [/INST]")
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == ""
    assert result.stderr.split() == ["WARNING", "shown", "[/INST]"]


def test_an_unknown_level_is_refused_and_changes_nothing():
    handlers, was_configured = list(logging.getLogger().handlers), logger_package._rich_logging_configured
    with pytest.raises(ConfigError, match="'LOUD'"):
        configure_rich_logging("LOUD")
    assert logging.getLogger().handlers == handlers
    assert logger_package._rich_logging_configured == was_configured
