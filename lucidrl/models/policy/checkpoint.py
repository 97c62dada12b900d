"""Weights and optimizer of a policy on disk, written and read by all ranks together, whatever their layout.

The weights are a Hugging Face model folder. All files hold whole tensors, so that another number of ranks, or another
way to shard, can go on from them.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from lucidrl.checkpoint.manager import STATE_NAME
from lucidrl.checkpoint.manifest import MANIFEST_NAME, FileDigest, is_as_listed, verify_manifest, write_manifest
from lucidrl.checkpoint.staging import clean_up_after_killed_processes, locked, make_hidden_folder, put_in_place
from lucidrl.checkpoint.tensors import TensorSpec, open_tensors
from lucidrl.checkpoint.writer import CheckpointWriter, TensorSet, agreed
from lucidrl.distributed.collectives import gather_over
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.models.loading import DTYPES
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.offload import Offload
from lucidrl.models.policy.optimizer_state import (
    OPTIMIZER_STEM,
    STRUCTURE_NAME,
    check_same_shapes,
    load_whole_state,
    read_whole_state,
    whole_state,
)
from lucidrl.models.policy.sharding import Sharding
from lucidrl.profiling.spans import span

WEIGHTS_STEM = "model"


class PolicyCheckpoints:
    """Saves and loads one rank of a policy, together with the others; every method but two is for all of them.

    Args:
        offload: knows whether weights and optimizer are where they can be read.
        optimizer: its state is saved and loaded where a folder for it is given.
        tokenizer: saved where a folder for it is given.
    """

    def __init__(
        self,
        sharding: Sharding,
        offload: Offload,
        optimizer: PolicyOptimizer | None,
        tokenizer: PreTrainedTokenizerBase,
        config: PolicyConfig,
    ) -> None:
        self._sharding, self._offload, self._optimizer, self._tokenizer = sharding, offload, optimizer, tokenizer
        self._precision = config.precision
        self._rank, self._group = sharding.mesh.rank, sharding.mesh.world
        pin_memory = sharding.mesh.device.type == "cuda"
        self._writer = CheckpointWriter(self._rank, sharding.mesh.layout.size, self._group, pin_memory=pin_memory)

    @span("save")
    def begin(self, weights: str, optimizer: str | None = None, tokenizer: str | None = None) -> int:
        """Copy what is to be saved and write it in the background, into new folders; see `CheckpointWriter.begin`."""
        self._offload.check_weights("saving")
        shapes, dtype = self._sharding.shapes(), DTYPES[self._precision]
        specs = {name: TensorSpec(dtype, tuple(shape)) for name, shape in shapes.items()}
        sets = [TensorSet(Path(weights), WEIGHTS_STEM, specs, self._sharding.full_weights)]
        small_files: dict[Path, bytes] = {}
        if optimizer is not None:
            state = whole_state(self._sharding, self._known_optimizer("saving"))
            specs = {name: TensorSpec.of(tensor) for name, tensor in state.tensors.items()}
            sets.append(TensorSet(Path(optimizer), OPTIMIZER_STEM, specs, state.gather))
            structure = json.dumps(state.structure, indent=1, allow_nan=False) + "\n"
            small_files[Path(optimizer, STRUCTURE_NAME)] = structure.encode()
        if self._rank == 0:
            small_files |= {Path(weights, name): content for name, content in self._config_files.items()}
            if tokenizer is not None:
                small_files |= {Path(tokenizer, name): content for name, content in self._tokenizer_files.items()}
        return self._writer.begin(sets, small_files)

    def is_written(self) -> bool:
        """Whether this rank has written what was begun; the other ranks are not asked."""
        return self._writer.is_done()

    @span("save")
    def finish(self) -> dict[Path, FileDigest]:
        """Wait for this rank's files, without the other ranks; see `CheckpointWriter.finish`."""
        return self._writer.finish()

    @span("save")
    def save(self, weights: str, optimizer: str | None = None, tokenizer: str | None = None) -> None:
        """Write folders, each of which appears, with a manifest, when it is complete.

        Raises:
            CheckpointError: also for a folder that holds something else, which is not replaced.
        """
        targets = {path: Path(path).resolve() for path in (weights, optimizer, tokenizer) if path is not None}
        with ExitStack() as at_end:
            made = agreed(lambda: _make_hidden(set(targets.values()), at_end) if self._rank == 0 else {}, self._group)
            hidden = gather_over(made, self._group)[0]
            places: dict[str | None, str] = {path: str(hidden[target]) for path, target in targets.items()}
            self.begin(places[weights], places.get(optimizer), places.get(tokenizer))
            by_rank = gather_over(agreed(self.finish, self._group), self._group)
            digests = {path: digest for own in by_rank for path, digest in own.items()}
            agreed(lambda: _put_all_in_place(hidden, digests) if self._rank == 0 else None, self._group)

    @span("load")
    def load(self, weights: str, optimizer: str | None = None, *, verify: bool) -> None:
        """Take weights, and the optimizer's state if its folder is given; all of it, or nothing.

        Args:
            verify: compare the files with the manifest of their folder, or of the checkpoint it lies in, if there is
                one. Names and shapes are compared with the model's in any case.

        Raises:
            CheckpointError: names the file and the reason; on all ranks, and before anything is changed.
        """
        self._offload.check_weights("loading")
        known = self._known_optimizer("loading") if optimizer is not None else None
        if verify:
            folders = [Path(path) for path in (weights, optimizer) if path is not None]
            agreed(lambda: _verify(folders) if self._rank == 0 else None, self._group)

        def open_both() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            saved = self._open_weights(Path(weights))
            return saved, read_whole_state(Path(optimizer), self._sharding, known) if optimizer and known else {}

        saved, state = agreed(open_both, self._group)
        self._sharding.load_full_weights(saved)
        if self._optimizer is not None:
            self._optimizer.take_weights()
        if known is not None:
            load_whole_state(self._sharding, known, state)

    def _known_optimizer(self, what: str) -> PolicyOptimizer:
        if self._optimizer is None:
            raise ConfigError(
                f"{what} was given an optimizer_path, but this policy was made with init_optimizer=False; leave it out"
            )
        self._offload.check_optimizer(what)
        return self._optimizer

    @cached_property
    def _config_files(self) -> dict[str, bytes]:
        return _files_saved_by(lambda folder: _save_config(self._sharding.model.model, self._precision, folder))

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        return _files_saved_by(self._tokenizer.save_pretrained)

    def _open_weights(self, folder: Path) -> dict[str, torch.Tensor]:
        """Weights that have the names and shapes of the model's; they are read as they are used."""
        saved = open_tensors(folder, WEIGHTS_STEM)
        model: PreTrainedModel = self._sharding.model.model
        buffers = {name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_buffers()}
        for name, tensor in saved.items():
            if not tensor.is_floating_point():
                raise CheckpointError(f"{folder} cannot be used: {name} is of {tensor.dtype}, which weights never are")
        found = {name: list(tensor.shape) for name, tensor in saved.items() if name not in buffers}
        check_same_shapes(folder, self._sharding.shapes(), found)
        return saved


def _save_config(model: PreTrainedModel, precision: str, folder: str) -> None:
    """What makes a folder of weights a model: its config, how it generates, and its code if it has its own."""
    config: Any = copy.deepcopy(model.config)
    config.dtype = precision
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _files_saved_by(save: Callable[[str], object]) -> dict[str, bytes]:
    """What a function writes into a folder, by relative path. It is the same each time, and slow for a tokenizer."""
    with TemporaryDirectory() as folder:
        save(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def _verify(folders: Iterable[Path]) -> None:
    for folder in folders:
        if (folder / MANIFEST_NAME).exists():
            verify_manifest(folder)
        elif (folder.parent / MANIFEST_NAME).exists() and (folder.parent / STATE_NAME).exists():
            verify_manifest(folder.parent, below=folder.name)


def _make_hidden(targets: set[Path], at_end: ExitStack) -> dict[Path, Path]:
    """A folder to write for each target; what is left of them in the end is removed."""
    for target in targets:
        inside = [other for other in targets if other != target and other.is_relative_to(target)]
        if inside:
            raise CheckpointError(f"{inside[0]} lies inside of {target}; give folders beside each other")
        clean_up_after_killed_processes(target.parent, target.name)
        if target.exists() and not _may_be_replaced(target):
            raise CheckpointError(
                f"{target} exists and holds something else than save_checkpoint wrote, so it is not replaced; "
                "name another folder"
            )
    hidden = {}
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden[target] = make_hidden_folder(target)
        at_end.callback(shutil.rmtree, hidden[target], ignore_errors=True)
        at_end.enter_context(locked(hidden[target]))
    return hidden


def _may_be_replaced(folder: Path) -> bool:
    """Whether it is empty, or holds nothing but what `save` wrote there; the checkpoint of a run is more than that."""
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        return is_as_listed(folder) and not (folder / STATE_NAME).exists()
    except CheckpointError:
        return False


def _put_all_in_place(hidden: dict[Path, Path], digests: dict[Path, FileDigest]) -> None:
    for target, folder in hidden.items():
        known = {path: digest for path, digest in digests.items() if path.is_relative_to(folder)}
        write_manifest(folder, known)
        put_in_place(folder, target)
