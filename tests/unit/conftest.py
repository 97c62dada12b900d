"""What tests of commands and of saved models share."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from lucidrl import cli


@pytest.fixture(scope="session")
def embedded_folder(tmp_path_factory) -> Path:
    """The embedded model and its tokenizer as a Hugging Face folder; tests must not change it."""
    from lucidrl.models.embedded import embedded_model, embedded_tokenizer  # torch is imported at use

    folder = tmp_path_factory.mktemp("model")
    embedded_model(warm=True, seed=0, attn_implementation="eager").save_pretrained(folder)
    embedded_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def lucidrl(monkeypatch, capfd):
    """Runs a command in this process; returns its exit code, output and errors."""
    monkeypatch.setattr("lucidrl.recipes.run.configure_rich_logging", lambda **options: None)

    def call(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lucidrl", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capfd.readouterr()

    return call
