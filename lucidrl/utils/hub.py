"""Models and datasets of a Hugging Face hub, by the names `hub:ORG/NAME[@REVISION][/PATH]`.

Only names with the prefix `hub:` are downloaded. The files go to the cache of huggingface_hub, which reads these
variables: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS. Neither code nor pickle files
are downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from lucidrl.errors import ConfigError

Kind = Literal["model", "dataset"]

PREFIX = "hub:"
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Weights, configs, chat templates and tokenizers."""
DATA_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
"""Suffixes of data files."""
_FORM = "hub:ORG/NAME, with @REVISION (a branch, tag or commit) and /PATH after it if you want"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"hub:(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[^/@\s]+))?(?:/(?P<path>.+))?")
_LIKE_AN_ID = re.compile(rf"{_PART}/{_PART}")
_MOST_CHARACTERS = 96
_PROGRESS = "huggingface_hub"


@dataclass(frozen=True)
class HubName:
    """The parts of `hub:ORG/NAME[@REVISION][/PATH]`."""

    repository: str
    revision: str | None
    path: str
    """Folder, file or pattern in the repository; empty for all files."""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.repository}{revision}{'/' if self.path else ''}{self.path}"


def is_hub_id(name: object) -> bool:
    """Whether a setting names a repository of the hub."""
    return isinstance(name, str) and name.startswith(PREFIX)


def looks_like_an_id(name: str) -> bool:
    """Whether a name without the prefix `hub:`, such as `org/name`, may be meant as a repository of the hub."""
    return _LIKE_AN_ID.fullmatch(name) is not None


def parse_hub_id(name: str) -> HubName:
    """Split a name; raise ConfigError if it is malformed."""
    match = _NAME.fullmatch(name)
    repository, path = (match["repository"], match["path"] or "") if match else ("", "")
    if (
        match is None
        or len(repository) > _MOST_CHARACTERS
        or any(pair in repository for pair in ("--", ".."))
        or repository.endswith(".git")
        or path.startswith("/")
        or ".." in path.split("/")
    ):
        raise ConfigError(f"{name!r} is not a name on the hub; write {_FORM}, such as hub:org/name@main/data")
    return HubName(repository, match["revision"], path.rstrip("/"))


def downloaded(name: str, kind: Kind) -> Path:
    """Download the files that are not in the cache, and return the folder of the repository's files.

    Args:
        name: `hub:ORG/NAME[@REVISION][/PATH]`. For a model, PATH is the model's folder in the repository. For a
            dataset, PATH is a folder, file or pattern: only such files are downloaded, and the caller selects them in
            the returned folder.

    Raises:
        ConfigError: the name is malformed, the hub has no such repository or revision, the hub refuses access, the hub
            cannot be reached and the cache lacks files, or the repository has no usable files.
    """
    return _download(parse_hub_id(name), kind)


def pinned(name: str, kind: Kind) -> str:
    """Download as `downloaded` does, and return the name with the commit as its revision.

    A pinned name always means the same files, so files in the cache are used without a request to the hub.
    """
    hub_name = parse_hub_id(name)
    return str(HubName(hub_name.repository, _download(hub_name, kind).name, hub_name.path))


def _download(name: HubName, kind: Kind) -> Path:
    from huggingface_hub import snapshot_download

    with _as_config_error(name, kind), _visible_progress():
        folder = Path(
            snapshot_download(
                name.repository,
                repo_type=kind,
                revision=name.revision,
                allow_patterns=_patterns(name, kind),
                ignore_patterns=_ignored(name) if kind == "model" else None,
            )
        )
    _check_files(folder, name, kind)
    return folder


def _patterns(name: HubName, kind: Kind) -> list[str]:
    """Patterns of the files to download, in which `*` also matches `/`."""
    if kind == "model":
        return [f"{name.path}/{pattern}" if name.path else pattern for pattern in MODEL_FILES]
    if not name.path:
        return [f"*{suffix}" for suffix in DATA_FILES]
    if name.path.endswith(DATA_FILES):
        return [name.path]
    return [f"{name.path}{end}" for suffix in DATA_FILES for end in (suffix, f"/*{suffix}")]


def _ignored(name: HubName) -> list[str]:
    """Patterns of files not to download: subfolders of the model's folder, and second copies of its weights."""
    below = f"{name.path}/" if name.path else ""
    return [f"{below}*/*", f"{below}consolidated*.safetensors"]


def _check_files(folder: Path, name: HubName, kind: Kind) -> None:
    if kind == "model":
        model = folder / name.path
        if not (model / "config.json").is_file():
            raise ConfigError(
                f"{name} has no config.json, so it is not a model; choose the repository of a language model"
            )
        if not any(model.glob("*.safetensors")):
            raise ConfigError(
                f"{name} has no safetensors files, and pickled weights are not downloaded, because they can run code; "
                "choose a repository with safetensors, or convert the weights and give their folder"
            )
        return
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    if not any(fnmatchcase(file, pattern) for file in names for pattern in _patterns(name, kind)):
        raise ConfigError(
            f"{name} has no data files ({', '.join(DATA_FILES)}){' at that path' if name.path else ''}; choose "
            f"another {'path' if name.path else 'dataset'}"
        )


@contextmanager
def _visible_progress() -> Iterator[None]:
    """Show the progress of downloads, which a run hides with all other bars of the libraries."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    is_hidden = are_progress_bars_disabled(_PROGRESS)
    if constants.HF_HUB_DISABLE_PROGRESS_BARS or not is_hidden:
        yield
        return
    enable_progress_bars(_PROGRESS)
    try:
        yield
    finally:
        disable_progress_bars(_PROGRESS)


@contextmanager
def _as_config_error(name: HubName, kind: Kind) -> Iterator[None]:
    """Turn the errors of huggingface_hub into one sentence."""
    from huggingface_hub import constants, errors

    asked = f"{PREFIX}{name.repository}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{asked} is gated: the hub gives it only to accounts that accepted its terms; accept them at "
            f"{constants.ENDPOINT}/{_web_path(name, kind)}, and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{constants.ENDPOINT} has no {kind} {name.repository}, or it is private; check the name, and for a "
            "private one set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{asked} has no revision {name.revision!r}; write a branch, tag or commit of it after the @"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError) as error:
        raise ConfigError(_not_cached(name, error)) from error
    except Exception as error:  # of the network or the disk
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{asked} cannot be downloaded to {constants.HF_HUB_CACHE} ({type(error).__name__}: {reason}); check "
            "network and disk, or give a folder on disk"
        ) from error


def _not_cached(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors

    answer = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
    if isinstance(answer, errors.HfHubHTTPError):
        status = answer.response.status_code
        reason, remedy = f"{constants.ENDPOINT} answered with HTTP status {status}", "try again later"
    elif constants.HF_HUB_OFFLINE:
        reason, remedy = "HF_HUB_OFFLINE forbids the download", "unset HF_HUB_OFFLINE"
    else:
        reason, remedy = f"{constants.ENDPOINT} cannot be reached", "check the network"
    return (
        f"{name} is not completely in the cache {constants.HF_HUB_CACHE}, and {reason}; {remedy}, or give a folder on "
        "disk"
    )


def _web_path(name: HubName, kind: Kind) -> str:
    return name.repository if kind == "model" else f"datasets/{name.repository}"
