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
    r"deadlines?(?!=None)": "timeout",  # but: a keyword of hypothesis
    r"patience": "timeout",
    r"hears? of": "heartbeat",
    r"tells? of": "log, warn, report",
    r"(is|are|was|were) told": "raise, log, warn, report",
    r"(?<!found\.)weight[ _](version|age)s?": "policy_version, staleness",  # but: an attribute of vLLM
    r"of (its|their) own": "its own, separate",
    r"in company": "with others",
    r"to the bit": "bit-identical",
    r"unbroken": "uninterrupted",
    r"struck|blows?": "fault, inject",
    r"what is given": "input",
    r"(?<!llm )(?<!llm-)judg(es|ed|ing|ements?)": "score (but: LLM judge)",
    # The reward `judge` has this name in code and settings.
    r"(?<!llm )(?<!llm-)(?<!name: )(?<!verifier )(?<![./=`\"'])judge(?![./\\`\"'])": "score (but: LLM judge)",
    rf"({AMOUNTS}) an? ({UNITS})": "per",
}
ANY_RETIRED = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
TABLE = "docs/glossary.md"
EXEMPT = {TABLE, Path(__file__).relative_to(ROOT).as_posix()}
PATTERNS = (
    "*.md",
    "mkdocs.yml",
    "Makefile",
    "docs/**/*.md",
    "benchmarks/**/*.py",
    "benchmarks/Makefile.inc",
    "examples/*.py",
    "lucidrl/**/*.py",
    "tests/**/*.py",
    "tools/*.py",
)
TEXTS = sorted(
    path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.relative_to(ROOT).as_posix() not in EXEMPT
)
DEFINITION = re.compile(r"\s*(async )?(def|class) ")


def retired_words(text: str) -> list[str]:
    """The first retired word of each line that has one, with its replacement."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if DEFINITION.match(line):
            line = line.replace("_", " ")
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
    lines = [
        "Whoever waits",
        "is told of",
        "the deadline;",
        "8 rows a step,",
        "judged by",
        "to judge",
        "a process of its own.",
    ]
    lines += ["equal to the bit", "def test_runs_to_the_bit():", "    async def whoever_waits(self):"]
    assert len(retired_words("\n".join([*lines, "a plain line", "deadline=None"]))) == len(lines)
