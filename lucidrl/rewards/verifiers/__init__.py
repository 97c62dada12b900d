"""Verifiers by name. A verifier scores one completion against the columns of its row and does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lucidrl.errors import ConfigError
from lucidrl.rewards.interfaces import DEFAULT_LIMITS, LLM_JUDGE, Limits, Verifier
from lucidrl.rewards.verifiers.choice import ChoiceConfig, ChoiceVerifier
from lucidrl.rewards.verifiers.code import CodeConfig, CodeVerifier
from lucidrl.rewards.verifiers.exact import ExactConfig, ExactVerifier
from lucidrl.rewards.verifiers.json_schema import JsonSchemaConfig, JsonSchemaVerifier
from lucidrl.rewards.verifiers.math import MathConfig, MathVerifier
from lucidrl.rewards.verifiers.numeric import NumericConfig, NumericVerifier
from lucidrl.rewards.verifiers.penalties import (
    LengthConfig,
    LengthVerifier,
    OverlongConfig,
    OverlongVerifier,
    RepetitionConfig,
    RepetitionVerifier,
)
from lucidrl.rewards.verifiers.regex import RegexConfig, RegexVerifier
from lucidrl.utils.config import Config, validate
from lucidrl.utils.suggestions import closest


@dataclass(frozen=True)
class VerifierEntry:
    """A verifier, its options, and where it runs."""

    verifier: Callable[..., Verifier]
    """Makes the verifier from its config, and loads what it needs."""
    config: type[Config]
    runs_in_pool: bool
    """Whether the verifier may take long or runs code of the model, and so needs a process that can be killed."""
    takes_limits: bool = False
    """Whether `verifier` also takes the limits of a verification, because it stays within them itself."""

    def make(self, kwargs: Mapping[str, Any], limits: Limits = DEFAULT_LIMITS) -> Verifier:
        """Make the verifier from its options, so that its first call is not slower than later calls.

        Raises:
            ConfigError: for an unknown option, an invalid value, or a missing package.
        """
        config = validate(self.config, dict(kwargs), at="reward.kwargs")
        return self.verifier(config, limits) if self.takes_limits else self.verifier(config)


VERIFIERS: dict[str, VerifierEntry] = {
    "exact": VerifierEntry(ExactVerifier, ExactConfig, runs_in_pool=False),
    "numeric": VerifierEntry(NumericVerifier, NumericConfig, runs_in_pool=False),
    "choice": VerifierEntry(ChoiceVerifier, ChoiceConfig, runs_in_pool=False),
    "regex": VerifierEntry(RegexVerifier, RegexConfig, runs_in_pool=True),
    "json_schema": VerifierEntry(JsonSchemaVerifier, JsonSchemaConfig, runs_in_pool=True),
    "math": VerifierEntry(MathVerifier, MathConfig, runs_in_pool=True),
    "code": VerifierEntry(CodeVerifier, CodeConfig, runs_in_pool=True, takes_limits=True),
    "length": VerifierEntry(LengthVerifier, LengthConfig, runs_in_pool=False),
    "repetition": VerifierEntry(RepetitionVerifier, RepetitionConfig, runs_in_pool=False),
    "overlong": VerifierEntry(OverlongVerifier, OverlongConfig, runs_in_pool=False),
}


def verifier_entry(name: str) -> VerifierEntry:
    """The verifier of this name.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in VERIFIERS:
        known = [*VERIFIERS, LLM_JUDGE]
        close = closest(name, known)
        hint = f"did you mean {close}?" if close else f"the verifiers are {', '.join(known)}"
        raise ConfigError(f"unknown verifier {name!r}; {hint}")
    return VERIFIERS[name]


def make_verifier(name: str, kwargs: Mapping[str, Any], limits: Limits = DEFAULT_LIMITS) -> Verifier:
    """Make the verifier of this name from its options; see `VerifierEntry.make`."""
    return verifier_entry(name).make(kwargs, limits)
