"""Merge presets, files and overrides into the settings of a run.

A value such as `${oc.env:TOKEN}` is resolved for the run, but `config.yaml` keeps the reference: the secret is not
written, and a resume reads the variable again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lucidrl.algorithms.variants import Variant, bundle
from lucidrl.errors import ConfigError
from lucidrl.models.policy.config import EMBEDDED_MODELS
from lucidrl.recipes.base_config import command_of
from lucidrl.recipes.configs import BaseRunConfig, DistillRunConfig, GRPORunConfig, PPORunConfig, SFTRunConfig
from lucidrl.recipes.folder import run_config_path
from lucidrl.recipes.preference_configs import DPORunConfig, RewardModelRunConfig
from lucidrl.utils.config import aliases_of, load_config
from lucidrl.utils.layers import Merged, Source, merge_layers
from lucidrl.utils.logger.redact import secret_like_keys

log = logging.getLogger(__name__)

ALGORITHMS: dict[str, type[BaseRunConfig]] = {
    schema.algorithm: schema
    for schema in (GRPORunConfig, DistillRunConfig, SFTRunConfig, DPORunConfig, RewardModelRunConfig, PPORunConfig)
}
PRESETS = Path(__file__).with_name("presets")
OWN_TASK = ("data", "reward", "python_inputs")
"""Sections of settings that only a task of the user sets, not a built-in task; see `default_preset`."""

_KEY_REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.\[\]-]+)\s*\}")


def new_settings(
    algorithm: str,
    config_file: Path | dict[str, Any] | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
) -> BaseRunConfig:
    """Return the settings of a new run, merged from preset, file (or its content) and overrides; later sources win.

    Raises:
        ConfigError: a file is unreadable, an override malformed or a value invalid; the message lists all problems.
    """
    algorithm = algorithm.replace("-", "_")
    if algorithm not in ALGORITHMS:
        known = ", ".join(map(command_of, ALGORITHMS))
        raise ConfigError(f"--algorithm={algorithm} is unknown; choose one of {known}")
    schema = ALGORITHMS[algorithm]
    aliases = aliases_of(schema)
    if preset is None and config_file is None:
        written = [text.partition("=")[::2] for text in overrides]
        preset = default_preset(algorithm, {key: value for name, value in written for key in aliases.get(name, [name])})
    layers: list[tuple[Source, Path | dict[str, Any]]] = []
    if preset is not None:
        layers.append((Source("preset", preset), preset_path(preset)))
    if config_file is not None:
        is_file = isinstance(config_file, Path)
        layers.append((Source("file", str(config_file)) if is_file else Source("Python"), config_file))
    return _validated(schema, _with_variant(layers, overrides, aliases, num_below=int(preset is not None)))


def resumed_settings(
    algorithm: str,
    folder: Path,
    overrides: Sequence[str] = (),
    without: Sequence[str] = (),
    schema: type[BaseRunConfig] | None = None,
) -> BaseRunConfig:
    """Return the settings of a resumed run: those in its folder, changed by overrides.

    Args:
        without: settings of the run to leave out, by dotted key.
        schema: class of the settings; by default, that of the algorithm.

    Raises:
        ConfigError: the folder holds no run, or one of another algorithm.
    """
    own: tuple[Source, Path | dict[str, Any]] = (Source("run", str(folder)), run_config_path(folder))
    content = merge_layers([own], resolve=False).content
    found = [name for name in ALGORITHMS if name in content]
    if found and algorithm not in found:
        raise ConfigError(
            f"{folder} holds a run of {found[0]}, not of {algorithm}; resume it with "
            f"`lucidrl {command_of(found[0])} --resume {folder}`"
        )
    schema = schema or ALGORITHMS[algorithm]
    for section, _, key in (name.rpartition(".") for name in without):
        (content.get(section, {}) if section else content).pop(key, None)
        own = (own[0], content)
    return _validated(schema, _with_variant([own], overrides, aliases_of(schema), num_below=1))


def _with_variant(
    layers: Sequence[tuple[Source, Path | dict[str, Any]]],
    overrides: Sequence[str],
    aliases: Mapping[str, tuple[str, ...]],
    num_below: int,
) -> Merged:
    """Merge the layers, with the settings of `grpo.variant` above the first `num_below` of them.

    A preset and the settings of a resumed run hold choices of their authors or of every setting; a variant that the
    user sets later replaces these. The other settings that the user sets override the variant.
    """
    merged = merge_layers(layers, overrides, resolve=False, aliases=aliases)
    section = merged.content.get("grpo")
    name = section.get("variant") if isinstance(section, dict) else None
    source = merged.origins.of("grpo.variant")
    if name not in list(Variant) or source is None or source.kind in ("preset", "run"):
        return merged
    of_variant: tuple[Source, Path | dict[str, Any]] = (Source("variant", name), {"grpo": bundle(Variant(name))})
    layers = [*layers[:num_below], of_variant, *layers[num_below:]]
    return merge_layers(layers, overrides, resolve=False, aliases=aliases)


def default_preset(algorithm: str, given: Mapping[str, Any]) -> str | None:
    """Return the preset of a run without --preset and --config; None means the defaults.

    A preset that is tuned for a task applies to that task only: a user's environment, dataset or reward never inherits,
    for instance, the token limit of the arithmetic demo.

    Args:
        given: settings that the user set, by dotted key.
    """
    name = given.get("env.name")
    if algorithm == "ppo":
        return "cartpole" if name in (None, "CartPole-v1") else None
    if algorithm in ("sft", "ppo"):
        return None
    has_own_data = any(key == "env.prompts_file" or key.split(".")[0] in OWN_TASK for key in given)
    is_arithmetic = name in (None, "arithmetic") and not has_own_data
    is_embedded = given.get("policy.model_name", "embedded") in EMBEDDED_MODELS
    if algorithm == "distill":
        return "distill-demo" if is_embedded and is_arithmetic else "distill"
    if algorithm in ("dpo", "reward_model"):
        return f"{command_of(algorithm)}{'-demo' if is_embedded and is_arithmetic else ''}"
    if is_embedded:
        return "demo" if is_arithmetic else "task-embedded"
    return "chat" if is_arithmetic else "task"


def preset_of(config: BaseRunConfig) -> str:
    """Describe which preset the settings start from."""
    sources = set(config.origins.values())
    presets = sorted({source.name for source in sources if source.kind == "preset"})
    if presets:
        return f"preset {presets[0]}"
    return "settings of the run" if any(source.kind == "run" for source in sources) else "no preset"


def preset_path(name: str) -> Path:
    """Return the file of a preset, or raise ConfigError with the names of all presets."""
    known = {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}
    if name not in known:
        raise ConfigError(f"there is no preset {name!r}; the presets are {', '.join(known)}")
    return known[name]


def _validated(schema: type[BaseRunConfig], merged: Merged) -> BaseRunConfig:
    settings = merged.content
    config = load_config(schema, settings)
    for key in secret_like_keys(settings):
        log.warning(
            "%s looks like a secret and is written to config.yaml, which only you can read; to keep it out, set an "
            "environment variable and write %s='${oc.env:NAME}'",
            key,
            key,
        )
    return config.with_origins(merged.origins, environment_references(settings))


def environment_references(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return only the settings whose values depend on environment variables, unresolved; None if there are none."""

    def at(path: Sequence[str]) -> Any:
        node: Any = settings
        for part in path:
            node = node[int(part) if isinstance(node, list) else part]
        return node

    def left(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, dict):
            kept: Any = {key: left(item, (*path, str(key))) for key, item in node.items()}
            return kept if any(kept.values()) else None
        if isinstance(node, list):
            kept = [left(item, (*path, str(index))) for index, item in enumerate(node)]
            return kept if any(kept) else None
        return node if isinstance(node, str) and is_reference(node, path) else None

    def is_reference(text: str, path: tuple[str, ...]) -> bool:
        if "${oc.env:" in text or "\\${" in text:  # an escaped \${ is not a reference, but must stay escaped
            return True
        targets = [
            (*(path[: -len(dots)] if dots else ()), *re.findall(r"[^.\[\]]+", key))
            for dots, key in _KEY_REFERENCE.findall(text)
        ]
        return any(left(at(target), target) for target in targets)

    return left(settings, ())
