"""Writes the page: one HTML file with its data, scripts and styles inside, which loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import orjson

from lucidrl.errors import ConfigError
from lucidrl.report.page_data import page_data, page_title
from lucidrl.report.run_data import RunData
from lucidrl.utils.logger.folders import whole_file
from lucidrl.utils.logger.values import jsonable

_LIBRARY = "uplot/uPlot.iife.min.js"
_SCRIPTS = ("core.js", "charts.js", "timeline.js", "samples.js", "tables.js", "page.js")
_STYLES = ("uplot/uPlot.min.css", "report.css")
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{styles}</style>
</head>
<body>
<main id="main"><noscript>This page needs JavaScript.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{scripts}</script>
</body>
</html>
"""


def write_report(runs: Sequence[RunData], path: Path) -> int:
    """Write the page of one run, or of several runs to compare; return its size in bytes.

    The file is written completely or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = report_page(runs)
    try:
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}); choose another file with --output"
        ) from error
    return len(content)


def report_page(runs: Sequence[RunData]) -> bytes:
    """Return the page as UTF-8."""
    styles = "\n".join(map(_static, _STYLES))
    own = "\n".join(map(_static, _SCRIPTS))
    scripts = f'{_static(_LIBRARY)}\n(() => {{\n"use strict";\n{own}}})();\n'
    page = _PAGE.format(
        # Nothing is loaded from elsewhere, and no script runs but this one, whatever a sample contains.
        policy=f"default-src 'none'; img-src data:; script-src {_hash(scripts)}; style-src {_hash(styles)}",
        title=html.escape(page_title(runs)),
        styles=styles,
        data=_embedded(page_data(runs)),
        scripts=scripts,
    )
    return page.encode("utf-8", "replace")


def _embedded(data: object) -> str:
    """JSON that stays inside a script element: it has no `<`, so it cannot end the element or begin a comment."""
    try:
        text = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:  # a lone surrogate, or an integer beyond 64 bits
        text = orjson.dumps(jsonable(data))
    return text.decode().replace("<", "\\u003c")


def _static(name: str) -> str:
    return files("lucidrl.report").joinpath("static", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
