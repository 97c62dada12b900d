"""Words that docs/glossary.md retires do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AMOUNTS = "rows|steps|frames|prompts|samples|lines|seconds|tokens|bytes"
UNITS = "step|row|rank|prompt|call|batch|line|frame"
RETIRED = {
    r"whoever": "name the actor",
    r"nobody": "name the actor",
    r"verdicts?": "step result, reward",
    r"witness\w*": "worker",
    r"mend(s|ed|ing)?": "fix",
    r"deadlines?": "timeout",
    r"patience": "timeout",
    r"hears? of": "heartbeat",
    r"tells? of": "log, warn, report",
    r"(is|are|was|were) told": "raise, log, warn, report",
    r"weight[ _](version|age)s?": "policy_version, staleness",
    r"of (its|their) own": "its own, separate",
    r"in company": "with others",
    r"what is given": "input",
    r"(?<!llm )(?<!llm-)judg(e|es|ed|ing|ements?)": "score (but: LLM judge)",
    rf"({AMOUNTS}) an? ({UNITS})": "per",
}
TABLE = "docs/glossary.md"
PATTERNS = ("*.md", "docs/**/*.md", "examples/*.py", "tools/*.py", "mkdocs.yml", "Makefile", "lucidrl/**/*.py")
TEXTS = sorted(
    path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.relative_to(ROOT).as_posix() != TABLE
)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_retired_word_is_used(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"`[^`\n]+`", "", text)  # names of files, tests and settings
    for number, line in enumerate(text.splitlines(), start=1):
        for word, instead in RETIRED.items():
            found = re.search(rf"\b({word})\b", line, flags=re.IGNORECASE)
            assert not found, f"{path.name}:{number} says {found.group()!r}; say instead: {instead}"


def test_retired_words_are_found():
    sentence = "Whoever waits is told of the deadline; 8 rows a step, judged by a process of its own."
    found = [word for word in RETIRED if re.search(rf"\b({word})\b", sentence, flags=re.IGNORECASE)]
    assert len(found) == 6
