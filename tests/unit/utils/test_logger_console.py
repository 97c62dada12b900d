"""The terminal shows text literally, and log records once."""

import logging
import subprocess
import sys

import pytest

import lucidrl.utils.logger as logger_package
from lucidrl.errors import ConfigError, DataError
from lucidrl.utils.logger import configure_rich_logging, console, print_message_log_samples


def conversation(text, role="user"):
    return [{"role": role, "content": text}]


def test_markup_and_escape_codes_are_printed_literally(capsys):
    text = "[/INST] [bold]x[/bold] :smile: \x1b[31mred\x1b[0m \x9b2J \u202eevil bell\x07 \ud800"
    print_message_log_samples([conversation(text, role="[red]user")], [1.0])
    out = capsys.readouterr().out
    assert "[/INST] [bold]x[/bold] :smile: ␛[31mred␛[0m" in out
    assert "[red]user" in out
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(out)


def test_long_text_keeps_its_beginning_and_end(capsys):
    print_message_log_samples([conversation("BEGIN" + "x" * 50_000 + "END")], [1.0])
    out = capsys.readouterr().out
    assert "BEGIN" in out
    assert "END" in out
    assert "characters" in out
    assert len(out) < 3000


def test_best_and_worst_are_shown_with_statistics_of_all(capsys):
    logs = [conversation(f"sample-{i}-") for i in range(20)]
    print_message_log_samples(logs, [float(i) for i in range(20)], num_samples=3, step=7)
    out = capsys.readouterr().out
    assert "Step 7: 20 samples, reward mean 9.5, std 5.766, min 0, max 19" in out
    assert out.index("sample-19-") < out.index("sample-0-")
    assert out.count("sample-") == 3


def test_rewards_that_are_not_finite_are_counted_apart_and_never_best(capsys):
    logs = [conversation(name) for name in ("nan-one", "good-one", "bad-one")]
    print_message_log_samples(logs, [float("nan"), 1.0, 0.0], num_samples=1)
    out = capsys.readouterr().out
    assert "reward mean 0.5" in out
    assert "1 not finite" in out
    assert "good-one" in out
    assert "nan-one" not in out


@pytest.mark.parametrize("num_samples", range(8))
def test_as_many_different_samples_as_asked_for_are_chosen(num_samples):
    chosen = console._spread_by_reward([0.5, 0.1, 0.9, 0.3, 0.2], num_samples)
    assert len(set(chosen)) == len(chosen) == min(num_samples, 5)


def test_no_samples_is_no_error(capsys):
    print_message_log_samples([], [])
    assert "0 samples" in capsys.readouterr().out


def test_a_missing_reward_is_refused():
    with pytest.raises(DataError, match="2 message logs came with 1 rewards"):
        print_message_log_samples([[], []], [1.0])


def test_rich_logging_is_set_up_once_and_the_flag_says_so():
    code = """
import logging
import lucidrl.utils.logger as package
logging.basicConfig()
assert package._rich_logging_configured is False
for _ in range(2):
    package.configure_rich_logging("warning", show_time=False, show_path=False)
assert package._rich_logging_configured is True
logging.getLogger("x").info("hidden")
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
