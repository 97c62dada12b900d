"""The folder of an evaluation: settings, samples batch by batch, progress and result.

| file | content |
| --- | --- |
| eval.json | the settings, which decide whether a later call continues this evaluation |
| samples.jsonl | one line per finished prompt, with its completions, rewards and metrics |
| progress.json | number of finished prompts, size of samples.jsonl, state of the environment |
| result.json | estimates and metrics, when all prompts are finished |
| comparison.json | comparison with another model, if there was one; with --output, in the common folder |
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from lucidrl.collectors.rollouts import Sample
from lucidrl.data.datasets import Prompt
from lucidrl.errors import ConfigError, DataError
from lucidrl.utils.run_folder import LOCK_NAME

SETTINGS_NAME, SAMPLES_NAME = "eval.json", "samples.jsonl"
PROGRESS_NAME, RESULT_NAME, COMPARISON_NAME = "progress.json", "result.json", "comparison.json"
_MOST_SHOWN = 60


@dataclass(frozen=True)
class SavedSample:
    """A finished sample, as samples.jsonl keeps it."""

    reward: float
    turns: int
    num_sampled_tokens: int
    is_truncated: bool
    is_dropped: bool
    metrics: Mapping[str, float]
    vote: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> SavedSample:
        # JSON has no NaN.
        metrics = {name: math.nan if value is None else value for name, value in record["metrics"].items()}
        flags = (record["truncated"], record["dropped"])
        return cls(record["reward"], record["turns"], record["tokens"], *flags, metrics, record["vote"])


class EvalFolder:
    """An evaluation on disk. Prompts are finished in order, batch by batch; a killed process loses at most one batch.

    Args:
        settings: everything that changes completions or rewards.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = orjson.loads(orjson.dumps(settings, option=orjson.OPT_NON_STR_KEYS))
        self.num_finished = 0
        """Prompts that are finished."""
        self.env_state: dict[str, Any] | None = None
        """State of the environment after the finished prompts; None before the first batch."""

    def create(self) -> None:
        """Create the folder, unless it exists.

        Raises:
            ConfigError: it cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def open(self) -> None:
        """Start the evaluation, or continue the one that the folder holds; call this while the folder is locked.

        Raises:
            ConfigError: the folder holds other files or another evaluation, or it cannot be written.
        """
        try:
            if (self.path / SETTINGS_NAME).is_file():
                self._check_same(orjson.loads((self.path / SETTINGS_NAME).read_bytes()))
                self._read_progress()
                return
            own = (LOCK_NAME, _hidden(self.path / SETTINGS_NAME).name)  # the latter after a kill in the first write
            if others := [path.name for path in self.path.iterdir() if path.name not in own]:
                raise ConfigError(
                    f"{self.path} holds other files, such as {sorted(others)[0]}; choose a new or empty folder with "
                    "--output"
                )
            write_json(self.path / SETTINGS_NAME, self._settings)
        except OSError as error:
            raise self._unwritable(error) from error
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{self.path} is damaged ({error}); remove it, or choose another --output") from error

    def append(self, groups: Sequence[Sequence[Sample]], env_state: dict[str, Any]) -> None:
        """Add the samples of the next prompts; `env_state` is the state of the environment after them."""
        lines = b"".join(orjson.dumps(_record(group)) + b"\n" for group in groups)
        with (self.path / SAMPLES_NAME).open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        self.num_finished, self.env_state = self.num_finished + len(groups), env_state
        # Written last: after a kill in between, the next call cuts the samples to `size_bytes` of the previous batch.
        progress = {"num_prompts": self.num_finished, "size_bytes": size_bytes, "env": env_state}
        write_json(self.path / PROGRESS_NAME, progress)

    def groups(self) -> list[list[SavedSample]]:
        """Read the samples of all finished prompts, in order."""
        with (self.path / SAMPLES_NAME).open("rb") as file:
            return [[SavedSample.of(sample) for sample in orjson.loads(line)["samples"]] for line in file]

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        write_json(self.path / RESULT_NAME, result)

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self.path} cannot be written ({error}); choose another folder with --output")

    def _read_progress(self) -> None:
        path, samples = self.path / PROGRESS_NAME, self.path / SAMPLES_NAME
        if not path.is_file():
            samples.unlink(missing_ok=True)  # killed in the first batch
            return
        progress = orjson.loads(path.read_bytes())
        if not samples.is_file() or samples.stat().st_size < progress["size_bytes"]:
            raise ConfigError(f"{samples} is missing or incomplete; remove {self.path}, or choose another --output")
        os.truncate(samples, progress["size_bytes"])
        self.num_finished, self.env_state = progress["num_prompts"], progress["env"]

    def _check_same(self, found: Mapping[str, Any]) -> None:
        names = [name for name in {**self._settings, **found} if found.get(name) != self._settings.get(name)]
        if names:
            name = names[0]
            more = f" (and {len(names) - 1} more settings)" if len(names) > 1 else ""
            raise ConfigError(
                f"{self.path} holds another evaluation: {name} is {_shown(found.get(name))} there and "
                f"{_shown(self._settings.get(name))} here{more}; choose another --output, or remove the folder"
            )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically: readers find it complete or not at all."""
    hidden = _hidden(path)
    with hidden.open("wb") as file:
        options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        file.write(orjson.dumps(content, option=options) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return a short hash of settings."""
    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    return hashlib.sha256(orjson.dumps(settings, option=options)).hexdigest()[:8]


def digest_of_prompts(prompts: Iterable[Prompt]) -> str:
    """Return a hash of the prompts, including the `info` that completions are scored with."""
    found = hashlib.sha256()
    for prompt in prompts:
        content = [prompt.prompt_id, prompt.messages, prompt.info, prompt.stop_strings]
        found.update(orjson.dumps(content, default=repr, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY))
    return found.hexdigest()[:16]


def categories_of(prompts: Sequence[Prompt], column: str) -> list[str]:
    """Return the category of each prompt.

    Raises:
        DataError: a prompt has no such column.
    """
    for prompt in prompts:
        if column not in prompt.info:
            known = ", ".join(map(str, prompt.info)) or "none"
            raise DataError(f"--by {column}: {prompt.label} has no such column; choose one of its columns: {known}")
    return [str(prompt.info[column]) for prompt in prompts]


def _hidden(path: Path) -> Path:
    """Return the file that is written first and then renamed to `path`."""
    return path.with_name(f".{path.name}")


def _record(group: Sequence[Sample]) -> dict[str, Any]:
    prompt = group[0].prompt
    num_given = len(prompt.messages)
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": list(prompt.messages),
        "samples": [
            {
                "messages": [{"role": m["role"], "content": m["content"]} for m in sample.log[num_given:]],
                "vote": sample.vote,
                "reward": sample.reward,
                "metrics": sample.metrics or {},
                "tokens": sample.num_sampled_tokens,
                "turns": sample.turns,
                "truncated": sample.is_truncated,
                "dropped": sample.is_dropped,
            }
            for sample in group
        ],
    }


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
