"""docs/cluster.md shows the table that benchmarks/ray_faults.py prints."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_documented_faults_and_columns_are_those_of_the_benchmark(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("ray_faults")
    outcomes = [benchmark.Outcome(row.name, 1.0, 0, [], [], 3, 0, True) for row in benchmark.ROWS]
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    _, _, measured = page.partition("### Measured")
    documented = [line.split(" | ") for line in measured.splitlines() if line.startswith("| ")]
    header, rule, *rows = [line.split(" | ") for line in benchmark.table(outcomes).splitlines()]
    assert documented[:2] == [header, rule]
    names = [row[0] for row in documented[2 : 2 + len(rows)]]
    assert names == [row[0] for row in rows]
