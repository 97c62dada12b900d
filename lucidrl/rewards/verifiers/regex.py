"""`regex`: a regular expression must match, or its group must equal the reference answer."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal, Self

from pydantic import model_validator

from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.verifiers.reading import AnswerConfig, references_of, text_of


class RegexConfig(AnswerConfig):
    """The pattern, and the group to compare with the reference answer."""

    pattern: str
    """Regular expression of Python's `re`, searched in the completion."""
    group: int | str | None = None
    """Number or name of the group that must equal the reference answer. None: a match alone earns the reward, and
    the row needs no answer."""
    match: Literal["last", "first"] = "last"
    """Which match is compared, if there are several."""
    ignore_case: bool = False
    """Ignore upper and lower case, in the pattern and in the comparison."""
    multiline: bool = True
    """`^` and `$` match at every line."""
    dotall: bool = True
    """`.` matches line breaks too."""
    strip: bool = True
    """Ignore white space at both ends in the comparison."""

    @property
    def compiled(self) -> re.Pattern[str]:
        flags = {re.IGNORECASE: self.ignore_case, re.MULTILINE: self.multiline, re.DOTALL: self.dotall}
        return re.compile(self.pattern, sum(flag for flag, is_set in flags.items() if is_set))

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            pattern = self.compiled
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"pattern={self.pattern!r} is not a valid regular expression: {error}") from None
        if self.group is not None and self.group not in (*range(pattern.groups + 1), *pattern.groupindex):
            known = ", ".join(map(str, (*range(pattern.groups + 1), *pattern.groupindex)))
            raise ValueError(f"group={self.group!r} is not a group of pattern={self.pattern!r}; its groups are {known}")
        return self


class RegexVerifier:
    """Reward 1 for a match, or for a group that equals the reference answer; otherwise 0."""

    def __init__(self, config: RegexConfig) -> None:
        self._config = config
        self._pattern = config.compiled

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        config = self._config
        references = [] if config.group is None else references_of(row, config)
        text = text_of(completion, config)
        if config.group is None:
            return float(self._pattern.search(text) is not None)
        found = self._pattern.finditer(text)
        matches = list(islice(found, 1)) if config.match == "first" else deque(found, maxlen=1)
        if not matches:
            raise ParseFailure(f"the completion does not match {config.pattern!r}")
        match = matches[0]
        if match[config.group] is None:
            raise ParseFailure(f"group {config.group!r} of {config.pattern!r} captured nothing")
        captured = self._normalized(match[config.group])
        return float(captured in [self._normalized(reference) for reference in references])

    def _normalized(self, text: str) -> str:
        text = text.strip() if self._config.strip else text
        return text.casefold() if self._config.ignore_case else text
