"""Suggest a known name for an unknown one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lucidrl.errors import ConfigError

SYNONYMS = {
    "learning_rate": "lr",
    "gradient_clipping": "max_grad_norm",
    "model": "model_name",
    "num_steps": "max_steps",
    "steps": "max_steps",
}
"""Names in other libraries → names of our settings and of torch's arguments."""

_MIN_SIMILARITY = 0.5  # of names of the same parent
_CLEAR_SIMILARITY = 0.75  # of two spellings of one name, anywhere
_MAX_SUGGESTED_PATHS = 3


@dataclass(frozen=True)
class OtherNames:
    """Names by which users of other libraries know the settings of a schema."""

    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name → keys. At the top level, the name sets all of these keys that the schema has."""
    candidates: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Name → {key: meaning}: a name with several meanings, which an error lists."""

    def aliases_in(self, all_paths: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Return the aliases of keys that exist; an argument in `kwargs` exists if its `kwargs` do."""
        known = {".".join(path) for path in all_paths}
        in_kwargs = {f"{key}." for key in known if key.endswith(".kwargs")}
        found = {
            alias: tuple(key for key in keys if key in known or key[: key.rfind(".") + 1] in in_kwargs)
            for alias, keys in self.aliases.items()
        }
        return {alias: keys for alias, keys in found.items() if keys}

    def hint(self, path: Sequence[str], all_paths: Sequence[Sequence[str]], prefix: str = "") -> str | None:
        """Return the keys that the last name of `path` may mean, as the end of a complaint; None if there are none."""
        *parents, name = path
        if keys := self.aliases_in(all_paths).get(name):
            near = [key for key in keys if parents and key.startswith(f"{parents[0]}.")]
            return f"did you mean {' or '.join(prefix + key for key in near or keys)}?"
        known = {".".join(known_path) for known_path in all_paths}
        meanings = {key: meaning for key, meaning in self.candidates.get(name, {}).items() if key in known}
        options = [f"{prefix}{key} ({meaning})" for key, meaning in meanings.items()]
        if not options:
            return None
        listed = " or ".join([", ".join(options[:-1]), options[-1]] if len(options) > 1 else options)
        return f"it may mean {listed}; set the one that you mean"


NO_OTHER_NAMES = OtherNames()


def closest(name: str, known: Iterable[str], min_similarity: float = _MIN_SIMILARITY) -> str | None:
    """The most similar known name, or None; `SYNONYMS` count as their counterparts."""
    names = dict.fromkeys(known)
    spellings = {word: ours for word, ours in SYNONYMS.items() if ours in names} | {ours: ours for ours in names}
    found = difflib.get_close_matches(name, spellings, n=1, cutoff=min_similarity)
    return spellings[found[0]] if found else None


def unknown_key(
    path: Sequence[str],
    all_paths: Iterable[Sequence[str]],
    prefix: str = "",
    other_names: OtherNames = NO_OTHER_NAMES,
) -> str:
    """The complaint about a key that does not exist, with a suggestion.

    The suggestion is the first of these that exists: what `other_names` knows, a very similar key of the same parent, a
    very similar key elsewhere, a somewhat similar key of the same parent.

    Args:
        path: path of the key; numbers are entries of lists.
        all_paths: paths of all keys.
        prefix: goes before every path.
    """
    *parents, name = path
    all_paths = list(all_paths)
    place = [part for part in parents if not part.isdigit()]
    known = [known_path[-1] for known_path in all_paths if list(known_path[:-1]) == place]
    if name not in known and (other := other_names.hint(path, all_paths, prefix)):
        return f"unknown key {prefix}{'.'.join(path)}; {other}"
    paths: Sequence[Sequence[str]] = []
    if found := closest(name, known, _CLEAR_SIMILARITY):
        paths = [[*parents, found]]
    elif elsewhere := _similar_paths(name, parents, all_paths):
        paths = elsewhere
    elif found := closest(name, known):
        paths = [[*parents, found]]
    options = " or ".join(prefix + ".".join(option) for option in paths)
    hint = f"did you mean {options}?" if options else f"known here: {', '.join(sorted(known))}"
    return f"unknown key {prefix}{'.'.join(path)}; {hint}"


def check_arguments(factory: Callable[..., Any], kwargs: Mapping[str, Any], key: str, num_given: int = 0) -> None:
    """Raise ConfigError for arguments that `factory` does not take, unless it takes any keyword or has no signature.

    Args:
        key: the setting that holds `kwargs`.
        num_given: number of arguments passed by position.
    """
    try:
        parameters = list(inspect.signature(factory).parameters.values())[num_given:]
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    paths = [[name] for name in known]
    if unknown := [unknown_key([name], paths, f"{key}.") for name in kwargs if name not in known]:
        raise ConfigError("\n".join(unknown))


def _similar_paths(name: str, parents: Sequence[str], all_paths: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The paths of the most similar name; only those below the same first key, if there are any."""
    found = closest(name, (path[-1] for path in all_paths), _CLEAR_SIMILARITY)
    paths = [path for path in all_paths if path[-1] == found]
    near = [path for path in paths if parents and path[0] == parents[0]]
    return (near or paths)[:_MAX_SUGGESTED_PATHS]
