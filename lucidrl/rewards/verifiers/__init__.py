"""Verifiers by name. A verifier scores one completion against the columns of its row and does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lucidrl.errors import ConfigError
from lucidrl.rewards.interfaces import LLM_JUDGE, Verifier
from lucidrl.rewards.verifiers.choice import ChoiceConfig
from lucidrl.rewards.verifiers.code import CodeConfig
from lucidrl.rewards.verifiers.exact import ExactConfig
from lucidrl.rewards.verifiers.json_schema import JsonSchemaConfig
from lucidrl.rewards.verifiers.math import MathConfig
from lucidrl.rewards.verifiers.numeric import NumericConfig
from lucidrl.rewards.verifiers.penalties import LengthConfig, OverlongConfig, RepetitionConfig
from lucidrl.rewards.verifiers.regex import RegexConfig
from lucidrl.utils.config import Config, validate
from lucidrl.utils.suggestions import closest


@dataclass(frozen=True)
class VerifierEntry:
    """A verifier, its options, and where it runs."""

    path: str
    """`module:Class`."""
    config: type[Config]
    runs_in_pool: bool
    """Whether the verifier may take long or runs code of the model, and so needs a process that can be killed."""


_HERE = "lucidrl.rewards.verifiers"

VERIFIERS: dict[str, VerifierEntry] = {
    "exact": VerifierEntry(f"{_HERE}.exact:ExactVerifier", ExactConfig, runs_in_pool=False),
    "numeric": VerifierEntry(f"{_HERE}.numeric:NumericVerifier", NumericConfig, runs_in_pool=False),
    "choice": VerifierEntry(f"{_HERE}.choice:ChoiceVerifier", ChoiceConfig, runs_in_pool=False),
    "regex": VerifierEntry(f"{_HERE}.regex:RegexVerifier", RegexConfig, runs_in_pool=True),
    "json_schema": VerifierEntry(f"{_HERE}.json_schema:JsonSchemaVerifier", JsonSchemaConfig, runs_in_pool=True),
    "math": VerifierEntry(f"{_HERE}.math:MathVerifier", MathConfig, runs_in_pool=True),
    "code": VerifierEntry(f"{_HERE}.code:CodeVerifier", CodeConfig, runs_in_pool=True),
    "length": VerifierEntry(f"{_HERE}.penalties:LengthVerifier", LengthConfig, runs_in_pool=False),
    "repetition": VerifierEntry(f"{_HERE}.penalties:RepetitionVerifier", RepetitionConfig, runs_in_pool=False),
    "overlong": VerifierEntry(f"{_HERE}.penalties:OverlongVerifier", OverlongConfig, runs_in_pool=False),
}


def make_verifier(name: str, kwargs: Mapping[str, Any]) -> Verifier:
    """Make a verifier from its options and load what it needs, so that its first call is not slower than later calls.

    Raises:
        ConfigError: for an unknown name or option, an invalid value, or a missing package.
    """
    if name not in VERIFIERS:
        known = [*VERIFIERS, LLM_JUDGE]
        close = closest(name, known)
        hint = f"did you mean {close}?" if close else f"the verifiers are {', '.join(known)}"
        raise ConfigError(f"unknown verifier {name!r}; {hint}")
    entry = VERIFIERS[name]
    module_name, _, class_name = entry.path.partition(":")
    verifier_class = getattr(import_module(module_name), class_name)
    return verifier_class(validate(entry.config, dict(kwargs), at="reward.kwargs"))
