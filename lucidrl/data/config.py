"""Settings of datasets: files, columns, filters and the validation split."""

from __future__ import annotations

from os import PathLike
from pathlib import PurePath
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lucidrl.utils.config import Config


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, PathLike) else value


File = Annotated[str, BeforeValidator(_as_text), Field(min_length=1)]
Scalar = str | int | float | bool | None


PREFERENCE_COLUMNS = ("chosen", "rejected", "label")
"""Settings of columns that only preferences have."""
SETTINGS_OF_ROWS = (
    *("prompt", "answer", "completion", "template", "system_prompt", "max_prompt_tokens", "where"),
    *PREFERENCE_COLUMNS,
)
"""Settings that have an effect on rows of a file or a Python program only, not on prompts of an environment."""


class WeightedFile(Config):
    """A file of a mixture."""

    file: File
    """Path of a file or folder, or `hub:ORG/NAME`."""
    weight: PositiveFloat = 1.0
    """Probability that a row is drawn from this file, relative to the weights of the other files."""

    @model_validator(mode="before")
    @classmethod
    def _reads_name_alone(cls, content: Any) -> Any:
        return {"file": content} if isinstance(content, str | PathLike) else content


class DataConfig(Config):
    """Where prompts or examples come from, and which rows are used."""

    file: File | tuple[WeightedFile, ...] | None = None
    """JSONL, JSON, CSV, TSV or Parquet file, a folder of them, a pattern such as data/train-*.parquet, a folder that
    `datasets.save_to_disk` wrote, `hub:ORG/NAME[@REVISION][/PATH]`, or a list of {file: ..., weight: ...}. Default: the
    prompts of the environment; SFT completes each prompt with the `answer` in its `info`."""
    prompt: str | None = None
    """Column of the prompt: text, or a list of chat messages; default: `prompt` or `messages`."""
    answer: str | None = None
    """Column of the reference answer, which reward functions get as `answer`; default: `answer`, if it exists."""
    completion: str | None = None
    """Column of the completion to learn (SFT): text, or a list of chat messages; default: `completion`."""
    chosen: str | None = None
    """Column of the better completion of a preference: text, or a list of chat messages; default: `chosen`."""
    rejected: str | None = None
    """Column of the worse completion, as `chosen`; default: `rejected`."""
    label: str | None = None
    """Column that says whether the `completion` of a row is desirable, true or false, for `dpo.loss=kto`; default:
    `label`."""
    template: str | None = Field(default=None, max_length=100_000)
    """Jinja template of the user message, with the columns as variables: "Question: {{ question }}". The template
    runs in a sandbox."""
    system_prompt: str | None = None
    """System message before each prompt; a row that has a system message keeps its own."""
    max_prompt_tokens: PositiveInt | None = None
    """Skip rows whose prompt (for SFT and preferences: prompt and completion together) has more tokens than this."""
    where: dict[str, Scalar | tuple[Scalar, ...]] = Field(default_factory=dict)
    """Use only rows whose columns have these values, such as {level: easy, source: [a, b]}; a list allows any of its
    values."""
    limit: PositiveInt | None = None
    """Train on at most this many rows, the same ones in every run; default: on all rows. The files of a mixture share
    them by weight, at least one row each."""
    validation_file: File | None = None
    """File of validation rows; all rows of `file` are then used for training."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the rows held out for validation, chosen by a stable hash of the messages; has no effect with
    `validation_file`."""

    @property
    def files(self) -> tuple[WeightedFile, ...]:
        """All files with their weights; empty if the prompts come from the environment."""
        if self.file is None:
            return ()
        return (WeightedFile(file=self.file),) if isinstance(self.file, str) else self.file

    @property
    def title(self) -> str:
        """Names of the files, for display."""
        return " + ".join(PurePath(entry.file).name or entry.file for entry in self.files)

    @field_validator("file")
    @classmethod
    def _names_a_file(cls, file: Any) -> Any:
        if file == ():
            raise ValueError("the list of files is empty; name at least one file, or set data.file=null")
        return file

    @field_validator("template")
    @classmethod
    def _compiles(cls, template: str | None) -> str | None:
        if template is not None:
            from lucidrl.data.template import compiled  # jinja is imported at use

            compiled(template)
        return template

    @model_validator(mode="after")
    def _limit_suffices(self) -> Self:
        if self.limit is not None and self.limit < len(self.files):
            raise ValueError(
                f"limit={self.limit} is less than one row for each of the {len(self.files)} files; raise it, or "
                "remove files"
            )
        return self

    @model_validator(mode="after")
    def _has_one_source_of_user_messages(self) -> Self:
        if self.prompt is not None and self.template is not None:
            raise ValueError(
                f"prompt={self.prompt} would have no effect, because template writes the user message; remove one of "
                "them"
            )
        return self
