"""`lucidrl generate`: complete prompts of the command line or a file with a trained model, or chat with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import torch
import typer

from lucidrl.data.columns import Columns
from lucidrl.data.config import DataConfig
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.messages import render_next_turn, render_prompt, with_tokens
from lucidrl.data.sources import OPENERS, PythonRows, RowSource, open_source
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError, DataError
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.interfaces import GenerationDatumSpec
from lucidrl.models.loading import load_model, load_tokenizer
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.sources import resolved_name
from lucidrl.recipes.text_inputs import silence_progress_bars
from lucidrl.utils.device import default_device

PROMPTS_AT_ONCE = 64
"""Prompts per generated batch; completions are printed batch by batch."""
RESET, EXIT = "/reset", "/exit"
CHAT_HELP = f"write a message; {RESET} starts a new conversation, {EXIT} or Ctrl-D ends the chat"

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; with one sample per prompt, decoding is greedy."""

    samples: int = 1
    temperature: float = 1.0
    max_new_tokens: int = 64
    seed: int = 0


class Completer:
    """A model that completes prompts.

    Args:
        source: a run folder, checkpoint or model; see `lucidrl.models.sources`.
    """

    def __init__(self, source: str | Path, sampling: Sampling) -> None:
        silence_progress_bars()
        name = resolved_name(str(source), "RUN")
        self.tokenizer = load_tokenizer(name)
        model = LogprobModel(load_model(name, torch.float32), sampling.temperature).to(default_device())
        config = GenerationConfig(max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature)
        self._generator = BuiltinGenerator(model, self.tokenizer, config, seed=sampling.seed)
        self._samples = sampling.samples

    def complete(self, prompts: Iterable[Messages]) -> Iterator[list[str]]:
        """Yield the completions of each prompt, in order."""
        waiting = iter(prompts)
        while batch := list(islice(waiting, PROMPTS_AT_ONCE)):
            rows = [render_prompt(self.tokenizer, messages) for messages in batch for _ in range(self._samples)]
            texts = [self.text_of(ids) for ids in self.sampled_ids(rows)]
            for first in range(0, len(texts), self._samples):
                yield texts[first : first + self._samples]

    def sampled_ids(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Complete prompts, which are token ids; return the sampled token ids of each."""
        rows = [torch.tensor(ids) for ids in prompts]
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=int(self.tokenizer.pad_token_id))
        data: BatchedDataDict[GenerationDatumSpec] = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
        output = self._generator.generate(data, greedy=self._samples == 1).to("cpu")
        ends = output["unpadded_sequence_lengths"].tolist()
        return [row[start:end] for row, start, end in zip(output["output_ids"], lengths.tolist(), ends, strict=True)]

    def text_of(self, ids: torch.Tensor) -> str:
        """Decode token ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Chat:
    """A conversation with a model; sampled tokens stay in the history and are not tokenised again."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._log: LLMMessageLogType = []

    def reset(self) -> None:
        """Begin a new conversation."""
        self._log = []

    def reply(self, text: str) -> str:
        """Return the model's reply to a message; if this raises, the history is unchanged.

        Raises:
            DataError: the conversation is longer than the context of the model.
        """
        tokenizer, turn = self._completer.tokenizer, [{"role": "user", "content": text}]
        ids = render_next_turn(tokenizer, self._log, turn) if self._log else render_prompt(tokenizer, turn)
        log = [*self._log, *with_tokens(turn, ids)]
        [sampled] = self._completer.sampled_ids([torch.cat([message["token_ids"] for message in log]).tolist()])
        content = self._completer.text_of(sampled)
        self._log = [*log, {"role": "assistant", "content": content, "token_ids": sampled}]
        return content


def completions(source: str | Path, prompts: Iterable[str], sampling: Sampling) -> Iterator[str]:
    """Yield `samples` completions per prompt, in order."""
    completer = Completer(source, sampling)
    for texts in completer.complete([{"role": "user", "content": prompt}] for prompt in prompts):
        yield from texts


def complete_file(source: str | Path, file: Path, sampling: Sampling, output: Path | None) -> Iterator[str]:
    """Yield the completions of a file's prompts; with `output`, write them there as JSON lines instead.

    A line of the output repeats the columns of its prompt, with the key `completion` added.

    Raises:
        DataError: a prompt is malformed, or the file has no prompts; raised before the model is loaded.
        ConfigError: the output exists already, or cannot be written.
    """
    if output is not None:
        _check_is_new(output)
    rows, columns = _open_prompts(file), Columns(DataConfig())

    def prompts() -> Iterator[Messages]:
        for row in range(len(rows)):
            yield columns.prompt(rows.row(row), rows.place(row), rows.row_id(row)).messages

    for _ in prompts():  # a malformed row is an error before the model is loaded
        pass
    found = enumerate(Completer(source, sampling).complete(prompts()))
    if output is None:
        for _, texts in found:
            yield from texts
        return
    try:
        with output.open("xb") as written:
            for row, texts in found:
                for text in texts:
                    record = {**rows.row(row), "completion": text}
                    written.write(orjson.dumps(record, default=str) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written ({error}); choose another file") from error


def _open_prompts(file: Path) -> RowSource:
    """Open a file of prompts, as `data.file`; a file with another extension has one prompt per line."""
    if file.suffix.lower() in OPENERS or not file.is_file():
        return open_source(str(file))
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"--file {file} cannot be read ({error}); check its permissions") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not valid UTF-8 ({error}); write the prompts as text") from error
    rows = [{"prompt": line} for line in lines if line.strip()]
    if not rows:
        raise DataError(f"{file} has no prompts; write one per line")
    return PythonRows(rows, str(file))


def chat(completer: Completer, messages: Iterable[str], write: Callable[[str], None]) -> None:
    """Reply to messages until `/exit` or their end; `/reset` begins a new conversation."""
    conversation = Chat(completer)
    for message in messages:
        text = message.strip()
        if text == EXIT:
            return
        if text == RESET:
            conversation.reset()
            write("(new conversation)")
        elif text.startswith("/"):
            write(f"({text.split()[0]} is unknown: {CHAT_HELP})")
        elif text:
            try:
                write(conversation.reply(text))
            except DataError as error:
                write(f"({error}; {RESET} starts a new conversation)")


def _check_is_new(output: Path) -> None:
    if output.exists():
        raise ConfigError(f"--output {output} exists already; choose another file, or remove it")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.parent} does not exist; create it first")


def chat_on_terminal(source: str, sampling: Sampling) -> None:
    """Chat over standard input and output, until Ctrl-D, Ctrl-C or the end of the input."""
    completer = Completer(source, sampling)
    if sys.stdin.isatty():
        typer.echo(CHAT_HELP, err=True)
    try:
        chat(completer, _typed_lines(), typer.echo)
    except (EOFError, KeyboardInterrupt):  # Ctrl-D or Ctrl-C
        typer.echo()


def _typed_lines() -> Iterator[str]:
    """Yield lines of standard input; on a terminal, show a prompt and raise EOFError at Ctrl-D."""
    try:
        while True:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
            if not line and not sys.stdin.isatty():
                return
            yield line
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not valid UTF-8 ({error}); write text") from error


def with_standard_input(prompts: list[str]) -> list[str]:
    """Replace `-` with the lines of standard input."""
    if prompts.count("-") > 1:
        raise ConfigError("the prompt - occurs twice, but standard input can be read only once; write - once")
    if "-" not in prompts:
        return prompts
    try:
        lines = [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not valid UTF-8 ({error}); write one prompt per line as text") from error
    if not lines:
        raise DataError("standard input has no prompts; write one per line")
    return [line for prompt in prompts for line in (lines if prompt == "-" else [prompt])]
