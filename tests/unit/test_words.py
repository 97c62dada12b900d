"""Words that docs/glossary.md retires do not come back."""

from __future__ import annotations

import re
from pathlib import Path

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
ANY_RETIRED = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
TABLE = "docs/glossary.md"
PATTERNS = ("*.md", "docs/**/*.md", "examples/*.py", "tools/*.py", "mkdocs.yml", "Makefile", "lucidrl/**/*.py")
TEXTS = sorted(
    path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.relative_to(ROOT).as_posix() != TABLE
)


def retired_words(text: str) -> list[str]:
    """The first retired word of each line that has one, with its replacement."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if match := ANY_RETIRED.search(line):
            instead = next(instead for word, instead in RETIRED.items() if re.fullmatch(word, match[0], re.IGNORECASE))
            found.append(f"line {number}: instead of {match[0]!r} say: {instead}")
    return found


def test_no_retired_word_is_used():
    found = {}
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            text = re.sub(r"`[^`\n]+`", "", text)  # names of files, tests and settings
        if words := retired_words(text):
            found[path.relative_to(ROOT).as_posix()] = words
    assert not found


def test_retired_words_are_found():
    lines = ["Whoever waits", "is told of", "the deadline;", "8 rows a step,", "judged by", "a process of its own."]
    assert len(retired_words("\n".join([*lines, "a plain line"]))) == len(lines)
