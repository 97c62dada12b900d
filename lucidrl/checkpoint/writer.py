"""Writes gathered tensors in the background; each rank writes its own files."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from lucidrl.checkpoint.manifest import FileDigest
from lucidrl.checkpoint.staging import disk_full, is_disk_full
from lucidrl.checkpoint.tensors import (
    TensorFile,
    TensorSpec,
    index_name,
    index_text,
    plan_shards,
    shard_file_names,
    write_file,
)
from lucidrl.distributed.process_group import gather_over
from lucidrl.errors import CheckpointError, LucidError

T = TypeVar("T")
_log = logging.getLogger(__name__)

_NICENESS = 10
"""Nice level of the writing thread: it gets about a tenth of a busy core, so that training is not delayed."""


@dataclass(frozen=True)
class TensorSet:
    """Tensors that are saved together, as `stem.safetensors` or as shards with an index."""

    folder: Path
    stem: str
    specs: Mapping[str, TensorSpec]
    """Specs of all tensors; the same on every rank."""
    gather: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    """Iterates over the full tensors, in any dtype and on any device; every rank calls it."""
    is_one_file: bool = False
    """Write a single file whatever its size, and without an index, for readers that know no shards."""


class CheckpointWriter:
    """Writes one rank's files of a checkpoint.

    The writer copies tensors into host memory, and a thread writes the memory to disk. The memory is kept for the next
    save, because allocating it takes several times as long as copying.

    Args:
        rank: rank of this process among the ranks that write the checkpoint.
        num_ranks: number of ranks that write the checkpoint.
        group: process group of these ranks; None for a single rank.
        pin_memory: whether the tensors come from an accelerator.
    """

    def __init__(self, rank: int, num_ranks: int, group: ProcessGroup | None, *, pin_memory: bool) -> None:
        self._rank, self._num_ranks, self._group = rank, num_ranks, group
        self._pin_memory = pin_memory
        self._memory: dict[str, torch.Tensor] = {}
        """Host memory of the last save, or reserved for the first, by file name."""
        self._reserving: threading.Thread | None = None
        self._writing: Future[dict[Path, FileDigest]] | None = None
        self._needed_bytes = 0
        """Bytes of all ranks' tensors in the last save."""

    def reserve(self, sets: Sequence[TensorSet]) -> None:
        """Allocate the memory of a save in a thread, so that the first `begin` only copies.

        A new page of memory costs several times as much as a copy into a used page.
        """
        self._finish_reserving()
        self._reserving = threading.Thread(target=self._touch, args=(sets,), name="checkpoint-memory", daemon=True)
        self._reserving.start()

    def _touch(self, sets: Sequence[TensorSet]) -> None:
        _lower_priority()
        try:
            for tensor_set in sets:
                for path, names in self._own_files(_plan(tensor_set, self._num_ranks)[0]).items():
                    memory = self._file(path.name, tensor_set, names).memory
                    memory.numpy().fill(0)  # not by torch, whose threads train
                    self._memory[path.name] = memory
        except (RuntimeError, MemoryError) as error:
            _log.warning("no memory could be reserved for checkpoints (%s); the first save will try again", error)

    def _finish_reserving(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _own_files(self, names: Mapping[Path, list[str]]) -> dict[Path, list[str]]:
        """The files that this rank writes, with the names of their tensors."""
        return dict(list(names.items())[self._rank :: self._num_ranks])

    @torch.no_grad()
    def begin(self, sets: Sequence[TensorSet], small_files: Mapping[Path, bytes]) -> int:
        """Copy this rank's tensors and start to write them; call it on every rank.

        Waits for the previous save. When it returns, the tensors may change.

        Args:
            small_files: other files; only rank 0 writes them.

        Returns:
            The bytes that this rank writes.

        Raises:
            CheckpointError: if the disk has too little space (nothing is written then), or if the previous save failed.
        """
        agreed(self.finish, self._group)
        self._finish_reserving()
        plans = [_plan(tensor_set, self._num_ranks) for tensor_set in sets]
        contents: dict[Path, bytes] = {}
        if self._rank == 0:
            contents = {**small_files, **{path: text for _, index in plans for path, text in index.items()}}
        self._needed_bytes = sum(spec.size_bytes for tensor_set in sets for spec in tensor_set.specs.values())
        agreed(lambda: self._make_folders([tensor_set.folder for tensor_set in sets]), self._group)
        files: dict[Path, TensorFile] = {}
        for tensor_set, (names, _) in zip(sets, plans, strict=True):
            own = {path: self._file(path.name, tensor_set, listed) for path, listed in self._own_files(names).items()}
            _fill(list(own.values()), tensor_set)
            files |= own
        if self._pin_memory:
            torch.cuda.synchronize()
        self._memory = {path.name: file.memory for path, file in files.items()}
        self._writing = Future()
        # A daemon: a run that must exit at once does not wait for the disk.
        thread = threading.Thread(target=_write_all, args=(self._writing, files, contents), daemon=True)
        thread.name = "checkpoint-writer"
        thread.start()
        return sum(file.size_bytes for file in files.values()) + sum(map(len, contents.values()))

    def is_done(self) -> bool:
        """Whether `finish` would return at once."""
        return self._writing is None or self._writing.done()

    def finish(self) -> dict[Path, FileDigest]:
        """Wait until this rank's files are on disk; returns their digests, none if no save was begun.

        Raises:
            CheckpointError: if writing failed.
        """
        writing, self._writing = self._writing, None
        try:
            return writing.result() if writing is not None else {}
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(Path(error.filename), f"{self._needed_bytes} bytes are needed in all") from error
            raise CheckpointError(
                f"cannot write the checkpoint: {error}; check the disk (earlier checkpoints are unchanged)"
            ) from error

    def _make_folders(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        if self._rank == 0 and shutil.disk_usage(folders[0]).free < self._needed_bytes:
            raise disk_full(folders[0], f"{self._needed_bytes} bytes are needed in all")

    def _file(self, name: str, tensor_set: TensorSet, names: Sequence[str]) -> TensorFile:
        specs = {name: tensor_set.specs[name] for name in names}
        return TensorFile(specs, self._memory.pop(name, None), pin_memory=self._pin_memory)


def agreed(work: Callable[[], T], group: ProcessGroup | None) -> T:
    """The result of `work` on this rank; if it fails on any rank, every rank raises the first error.

    Call it on all ranks of the group; `work` must not communicate with other ranks.
    """
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except (LucidError, OSError, ValueError) as caught:
        error = caught
    for other in gather_over(error, group):
        if other is not None:
            raise other
    return result[0]


def _plan(tensor_set: TensorSet, num_ranks: int) -> tuple[dict[Path, list[str]], dict[Path, bytes]]:
    """The names of the tensors in each file and, for several files, the index."""
    sizes = {name: spec.size_bytes for name, spec in tensor_set.specs.items()}
    shards = [list(sizes)] if tensor_set.is_one_file else plan_shards(sizes, num_ranks)
    by_file = dict(zip(shard_file_names(tensor_set.stem, len(shards)), shards, strict=True))
    index = {}
    if len(shards) > 1:
        index[tensor_set.folder / index_name(tensor_set.stem)] = index_text(by_file, sizes).encode()
    return {tensor_set.folder / file: names for file, names in by_file.items()}, index


def _fill(files: Sequence[TensorFile], tensor_set: TensorSet) -> None:
    places = {name: file for file in files for name in file.names}
    copies = []
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, tensor in tensor_set.gather():
            file = places.pop(name, None)
            if file is None:
                continue
            if tensor.is_cpu:
                copies.append(pool.submit(file.fill, name, tensor))
            else:  # asynchronous, on the stream of this thread
                file.fill(name, tensor)
    for copy in copies:
        copy.result()
    assert not places, f"the gathered tensors lack {sorted(places)}"


def _lower_priority() -> None:
    """Give this thread a low priority, on Linux; elsewhere threads have the priority of their process."""
    if sys.platform == "linux":
        thread = threading.get_native_id()  # Linux would refuse to raise its priority if the process runs under `nice`
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _write_all(
    writing: Future[dict[Path, FileDigest]], files: Mapping[Path, TensorFile], contents: Mapping[Path, bytes]
) -> None:
    _lower_priority()
    digests: dict[Path, FileDigest] = {}
    path = Path()
    try:
        for path, file in files.items():
            digests[path] = file.write(path)
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            digests[path] = write_file(path, (content,))
        writing.set_result(digests)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)
        writing.set_exception(error)
