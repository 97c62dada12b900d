"""Saves and loads a policy's weights and optimizer; every rank must make these calls.

The weights are a Hugging Face model folder, or with LoRA a folder of the adapter alone that PEFT reads. Files hold full
tensors, so any number of ranks and any sharding can resume from them.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from lucidrl.checkpoint.manager import STATE_NAME, verify_part
from lucidrl.checkpoint.manifest import MANIFEST_NAME, FileDigest, is_as_listed, verify_manifest, write_manifest
from lucidrl.checkpoint.staging import clean_up_after_killed_processes, locked, make_hidden_folder, put_in_place
from lucidrl.checkpoint.tensors import TensorSpec, open_tensors
from lucidrl.checkpoint.writer import CheckpointWriter, TensorSet, agreed
from lucidrl.distributed.process_group import gather_over
from lucidrl.errors import CheckpointError
from lucidrl.models.adapter_folder import STEM as ADAPTER_STEM
from lucidrl.models.adapter_folder import Base, adapter_files, base_of, check_adapter, open_adapter, peft_name
from lucidrl.models.loading import DTYPES, is_reward_model
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.offload import Offload
from lucidrl.models.policy.optimizer_state import (
    check_same_shapes,
    full_state_files,
    load_full_state,
    read_full_state,
)
from lucidrl.models.policy.sharding import Sharding
from lucidrl.profiling.spans import span

WEIGHTS_STEM = "model"
_WITHOUT_OPTIMIZER = ", or omit optimizer_path to save or load the weights alone"


class PolicyCheckpoints:
    """Saves and loads a policy. Call `begin`, `save` and `load` on every rank."""

    def __init__(
        self,
        sharding: Sharding,
        offload: Offload,
        tokenizer: PreTrainedTokenizerBase,
        config: PolicyConfig,
        seed: int,
    ) -> None:
        self._sharding, self._offload, self._tokenizer = sharding, offload, tokenizer
        self._precision, self._lora = config.precision, config.lora
        self._rank, self._group = sharding.mesh.rank, sharding.mesh.world
        self._base: Base | None = None
        """What the adapter belongs to; on rank 0 only, which writes and checks it."""
        if self._lora is not None and self._rank == 0:
            self._base = base_of(config.model_name, seed)
        pin_memory = sharding.mesh.device.type == "cuda"
        self.writer = CheckpointWriter(self._rank, sharding.mesh.layout.size, self._group, pin_memory=pin_memory)

    @span("save")
    def begin(self, weights: str, optimizer: str | None = None, tokenizer: str | None = None) -> int:
        """Copy tensors and write them to new folders in the background; see `CheckpointWriter.begin`."""
        self._offload.check_weights("saving")
        sets, small_files = self._contents(weights, optimizer)
        if self._rank == 0:
            small_files |= {Path(weights, name): content for name, content in self._config_files.items()}
            if tokenizer is not None:
                small_files |= {Path(tokenizer, name): content for name, content in self._tokenizer_files.items()}
        return self.writer.begin(sets, small_files)

    def reserve(self, weights: str, optimizer: str | None = None) -> bool:
        """Allocate the memory of `begin` in the background; return False before the first optimizer update."""
        if optimizer is not None and not (self._offload.optimizer and self._offload.optimizer.has_updated):
            return False
        self.writer.reserve(self._contents(weights, optimizer)[0])
        return True

    def _contents(self, weights: str, optimizer: str | None) -> tuple[list[TensorSet], dict[Path, bytes]]:
        """Return the tensors of a save, and the rest of the optimizer's state."""
        sets = [self._weights_to(Path(weights))]
        if optimizer is None:
            return sets, {}
        saved = self._offload.optimizer_for("saving with an optimizer_path", _WITHOUT_OPTIMIZER)
        tensors, small_files = full_state_files(Path(optimizer), self._sharding, saved)
        return [*sets, tensors], small_files

    def _weights_to(self, folder: Path) -> TensorSet:
        sharding, dtype = self._sharding, DTYPES[self._precision]
        specs = {name: TensorSpec(dtype, tuple(shape)) for name, shape in sharding.shapes.items()}
        if self._lora is None:
            return TensorSet(folder, WEIGHTS_STEM, specs, sharding.full_weights)

        def gather() -> Iterator[tuple[str, torch.Tensor]]:
            return ((peft_name(name), tensor) for name, tensor in sharding.full_weights())

        specs = {peft_name(name): spec for name, spec in specs.items()}
        return TensorSet(folder, ADAPTER_STEM, specs, gather, is_one_file=True)

    @span("save")
    def finish(self) -> dict[Path, FileDigest]:
        """Wait for this rank's files; see `CheckpointWriter.finish`."""
        return self.writer.finish()

    @span("save")
    def save(self, weights: str, optimizer: str | None = None, tokenizer: str | None = None) -> None:
        """Write folders with manifests; a folder appears under its final name only when it is complete.

        Raises:
            CheckpointError: writing failed, or an existing folder has files that `save` did not write.
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
        """Load weights and, if `optimizer` is set, the optimizer's state.

        Args:
            verify: compare files with the manifest of their folder or checkpoint, if there is one. Tensor names and
                shapes are always compared with the model's.

        Raises:
            CheckpointError: raised on all ranks, before anything changes; names the file and the reason.
        """
        self._offload.check_weights("loading")
        known = None
        if optimizer is not None:
            known = self._offload.optimizer_for("loading with an optimizer_path", _WITHOUT_OPTIMIZER)
        if verify:
            folders = [Path(path) for path in (weights, optimizer) if path is not None]
            agreed(lambda: _verify(folders) if self._rank == 0 else None, self._group)

        agreed(lambda: self._check_kind(Path(weights)) if self._rank == 0 else None, self._group)

        def open_both() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            saved = self._open_weights(Path(weights))
            return saved, read_full_state(Path(optimizer), self._sharding, known) if optimizer and known else {}

        saved, state = agreed(open_both, self._group)
        self._sharding.load_full_weights(saved.__getitem__)
        if self._offload.optimizer is not None:
            self._offload.optimizer.reset_to_model()
        if known is not None:
            load_full_state(self._sharding, known, state)

    @cached_property
    def _config_files(self) -> dict[str, bytes]:
        model = self._sharding.model.model
        pad_id: Any = self._tokenizer.pad_token_id
        files = _files_saved_by(lambda folder: _save_config(model, self._precision, pad_id, folder))
        if self._lora is not None and self._base is not None:
            files |= adapter_files(model, self._lora, self._base)
        return files

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        return _files_saved_by(self._tokenizer.save_pretrained)

    def _check_kind(self, folder: Path) -> None:
        """Refuse an adapter of another base, or an adapter in place of a model; called on rank 0."""

        def base() -> Base:
            assert self._base is not None, "rank 0 of a policy with adapters knows the base"
            return self._base

        check_adapter(folder, self._lora, base)

    def _open_weights(self, folder: Path) -> dict[str, torch.Tensor]:
        """Open weights lazily; raise CheckpointError if names or shapes differ from the model's."""
        saved = open_tensors(folder, WEIGHTS_STEM) if self._lora is None else open_adapter(folder)
        model: PreTrainedModel = self._sharding.model.model
        buffers = {name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_buffers()}
        for name, tensor in saved.items():
            if not tensor.is_floating_point():
                raise CheckpointError(
                    f"{folder} cannot be used: {name} is {tensor.dtype}, but weights must be floating point; "
                    "use unquantized weights"
                )
        found = {name: list(tensor.shape) for name, tensor in saved.items() if name not in buffers}
        check_same_shapes(folder, self._sharding.shapes, found)
        return saved


def _save_config(model: PreTrainedModel, precision: str, pad_id: int | None, folder: str) -> None:
    """Save a model's config, generation config and, if it has any, remote code."""
    config: Any = copy.deepcopy(model.config)
    config.dtype = precision
    config.architectures = [type(model).__name__]
    if is_reward_model(config):  # it finds the scored token of a row with the padding token
        config.get_text_config().pad_token_id = pad_id
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _files_saved_by(save: Callable[[str], object]) -> dict[str, bytes]:
    """Return the files that `save` writes into a folder, by relative path."""
    with TemporaryDirectory() as folder:
        save(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def _verify(folders: Iterable[Path]) -> None:
    for folder in folders:
        if (folder / MANIFEST_NAME).exists():
            verify_manifest(folder)
        else:
            verify_part(folder)


def _make_hidden(targets: set[Path], at_end: ExitStack) -> dict[Path, Path]:
    """Create a locked, hidden folder per target; `at_end` removes folders that were not moved to their target."""
    for target in targets:
        inside = [other for other in targets if other != target and other.is_relative_to(target)]
        if inside:
            raise CheckpointError(f"{inside[0]} is inside {target}; use separate folders")
        clean_up_after_killed_processes(target.parent, target.name)
        if target.exists() and not _may_be_replaced(target):
            raise CheckpointError(
                f"{target} exists and holds files that save_checkpoint did not write, so it is not replaced; "
                "choose another folder"
            )
    hidden = {}
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden[target] = make_hidden_folder(target)
        at_end.callback(shutil.rmtree, hidden[target], ignore_errors=True)
        at_end.enter_context(locked(hidden[target]))
    return hidden


def _may_be_replaced(folder: Path) -> bool:
    """Return whether a folder is empty or holds exactly what `save` wrote, and is not a run's checkpoint."""
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
