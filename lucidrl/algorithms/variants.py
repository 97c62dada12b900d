"""Variants of GRPO: each is a bundle of settings under a published name; docs/algorithms.md has formulas and papers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Variant(StrEnum):
    """A published algorithm that `grpo.variant` sets up."""

    GRPO = "grpo"
    DAPO = "dapo"
    DR_GRPO = "dr_grpo"
    GSPO = "gspo"
    CISPO = "cispo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"


_COMMON: dict[str, Any] = {
    "advantages.estimator": "group_normalized",
    "advantages.standardize": "none",
    "advantages.kl_coefficient": 0.0,
    "advantages.kl_level": "sequence",
    "loss.objective": "clip",
    "loss.ratio_level": "token",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.2,
    "loss.normalization": "token",
    "loss.kl_coefficient": 0.0,
    "drop_groups_without_signal": False,
    "mask_truncated": False,
}
_DIFFERENCES: dict[Variant, dict[str, Any]] = {
    Variant.GRPO: {"loss.normalization": "sequence", "loss.kl_coefficient": 0.04},
    Variant.DAPO: {"loss.clip_high": 0.28, "drop_groups_without_signal": True, "mask_truncated": True},
    Variant.DR_GRPO: {"advantages.estimator": "group_centered", "loss.normalization": "constant"},
    Variant.GSPO: {
        "loss.ratio_level": "sequence",
        "loss.clip_low": 3e-4,
        "loss.clip_high": 4e-4,
        "loss.normalization": "sequence",
    },
    Variant.CISPO: {"loss.objective": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 4.0},
    Variant.RLOO: {
        "advantages.estimator": "leave_one_out",
        "advantages.kl_coefficient": 0.05,
        "loss.ratio_level": "sequence_product",
        "loss.normalization": "sequence",
    },
    Variant.REINFORCE_PP: {
        "advantages.estimator": "plain",
        "advantages.standardize": "token",
        "advantages.kl_coefficient": 0.01,
        "advantages.kl_level": "token",
    },
}
VARIANTS: dict[Variant, dict[str, Any]] = {variant: {**_COMMON, **changes} for variant, changes in _DIFFERENCES.items()}
"""The settings of each variant, by dotted key below `grpo`. All variants set the same keys."""


def bundle(variant: Variant) -> dict[str, Any]:
    """Return the settings of a variant as nested mappings."""
    nested: dict[str, Any] = {}
    for key, value in VARIANTS[variant].items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return nested


def with_bundle(content: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """Return the settings with those of the variant added; settings in `content` stay as they are.

    Example:
        >>> with_bundle({"loss": {"clip_high": 0.3}}, Variant.DAPO)["loss"]["clip_high"]
        0.3
    """
    result = dict(content)
    for name, value in bundle(variant).items():
        given = result.get(name, {})
        if not isinstance(value, Mapping):
            result.setdefault(name, value)
        elif isinstance(given, Mapping):
            result[name] = {**value, **given}
    return result
