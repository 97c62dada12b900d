"""What tests of commands share."""

from __future__ import annotations

import io
import sys

import pytest

from lucidrl import cli


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
