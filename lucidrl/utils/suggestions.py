"""Suggest a known name for an unknown one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lucidrl.errors import ConfigError

SYNONYMS = {
    "learning_rate": "lr",
    "gradient_clipping": "max_grad_norm",
    "model": "model_name",
    "num_steps": "max_steps",
    "steps": "max_steps",
}
"""Names in other libraries of our settings and of torch's arguments."""

_MIN_SIMILARITY = 0.5  # of names of the same parent
_CLEAR_SIMILARITY = 0.75  # of two spellings of one name, anywhere
_MAX_SUGGESTED_PATHS = 3


def closest(name: str, known: Iterable[str], min_similarity: float = _MIN_SIMILARITY) -> str | None:
    """The most similar known name, or None; `SYNONYMS` count as their counterparts."""
    names = dict.fromkeys(known)
    spellings = {word: ours for word, ours in SYNONYMS.items() if ours in names} | {ours: ours for ours in names}
    found = difflib.get_close_matches(name, spellings, n=1, cutoff=min_similarity)
    return spellings[found[0]] if found else None


def unknown_key(path: Sequence[str], all_paths: Iterable[Sequence[str]], prefix: str = "") -> str:
    """The complaint about a key that does not exist, with a suggestion.

    Suggests a key of the same parent that is clearly alike, else one elsewhere, else any alike of the same parent.

    Args:
        path: path of the key; numbers are entries of lists.
        all_paths: paths of all keys.
        prefix: goes before every path.
    """
    *parents, name = path
    all_paths = list(all_paths)
    place = [part for part in parents if not part.isdigit()]
    known = [known_path[-1] for known_path in all_paths if list(known_path[:-1]) == place]
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
    """Raise ConfigError for arguments that `factory` does not take; skipped if its signature is open or unknown.

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
