"""`lucidrl data show`: what the model reads, how long it is, and what is dropped."""

from __future__ import annotations

import json
import re

import pytest

from lucidrl.errors import ConfigError, DataError
from lucidrl.recipes.data_show import _printable, show_data


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"{n}+1=", "answer": n + 1, "level": n % 4} for n in range(100)]
    rows.append({"question": "x" * 600, "answer": "\x1b[31mred", "level": 1})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def number_of(text, label):
    return int(re.search(rf"^{re.escape(label)} +(\d+)", text, flags=re.MULTILINE)[1])


def test_prompts_are_printed_as_the_model_reads_them(file, capsys):
    show_data(file, ["data.prompt=question", "data.where={level: [1, 2]}", "data.max_prompt_tokens=100"], num_rows=2)
    text = capsys.readouterr().out
    assert "── prompt 'sums:2' " in text
    assert "<|user|>1+1=<|assistant|>" in text
    assert "'answer': 2" in text
    assert text.count("<|user|>") == 2
    assert number_of(text, "in the files") == 101
    assert number_of(text, "dropped by data.where") == 50
    assert number_of(text, "dropped by data.max_prompt_tokens") == 1
    assert number_of(text, "for training") + number_of(text, "held out for validation") == 50
    assert re.search(r"^6 to 6 +5 +█+ *$", text, flags=re.MULTILINE)


def test_rows_that_would_stop_the_run_are_counted_with_the_remedy(file, capsys):
    show_data(file, ["data.template={{ answer }} {{ question }}", "data.where={level: 1}"], num_rows=99)
    text = capsys.readouterr().out
    assert number_of(text, "too long") == 1
    assert "set data.max_prompt_tokens=511" in text
    assert "\x1b" not in text
    assert _printable("a\x1b[31mb\n") == "a\\x1b[31mb\n"


def test_examples_are_shown_for_sft(file, capsys):
    settings = ["data.template={{ question }}", "data.completion=level", "data.where={level: 1}"]
    with pytest.raises(DataError, match=r"sums\.jsonl:2: column 'level' holds a int"):
        show_data(file, settings, algorithm="sft")
    show_data(None, [f"data.file={file}", "data.prompt=question", "data.completion=question"], algorithm="sft")
    assert "0+1=<|assistant|>0+1=" in capsys.readouterr().out


def test_nothing_to_show_is_one_sentence(file):
    with pytest.raises(ConfigError, match="no file is named"):
        show_data(None, [])
    with pytest.raises(ConfigError, match="--algorithm=ppo has no dataset"):
        show_data(file, [], algorithm="ppo")
    with pytest.raises(DataError, match=r"sums\.jsonl:1: has the columns question, answer, level; give either"):
        show_data(file, [])
