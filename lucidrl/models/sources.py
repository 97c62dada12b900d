"""Finds a model by name: a model folder, a run or checkpoint, the hub, or the package itself.

| name | model |
| --- | --- |
| `embedded`, `embedded-untrained` | the model in the package |
| a folder with config.json | the model in the folder |
| a folder with adapter_config.json | the base of the adapter with the adapter merged in |
| a run folder, or RUN@newest | the newest valid checkpoint of the run |
| RUN@best | the checkpoint of the run with the best validation metric |
| a checkpoint folder, such as RUN/checkpoints/step_20 | the model in the checkpoint |
| `hub:ORG/NAME[@REVISION][/FOLDER]` | downloaded from the hub, see `lucidrl.utils.hub` |
"""

from __future__ import annotations

from pathlib import Path

from lucidrl.checkpoint.config import CHECKPOINTS_NAME, CONFIG_NAME, CheckpointConfig
from lucidrl.checkpoint.manager import STATE_NAME, Checkpoint, CheckpointManager
from lucidrl.checkpoint.manifest import MANIFEST_NAME
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.models.policy.config import EMBEDDED_MODELS, PolicyConfig
from lucidrl.utils.config import merged_settings
from lucidrl.utils.hub import downloaded, is_hub_id, looks_like_an_id, parse_hub_id, pinned

WEIGHTS = "policy"
"""Folder inside a checkpoint that has the model."""
ADAPTER_CONFIG_NAME = "adapter_config.json"
"""File of a folder that holds an adapter instead of a model."""
NEWEST, BEST = "newest", "best"
MODEL_KEY = "policy.model_name"


def model_folder(name: str, key: str = MODEL_KEY) -> Path:
    """Return the folder with the files of a model. Download a hub model; verify a checkpoint.

    Args:
        name: a name from the table at the top of this module, except the embedded models.
        key: the setting whose value is `name`, for messages.

    Raises:
        ConfigError: there is no model of this name.
        CheckpointError: the run has no such checkpoint, or the checkpoint is damaged.
    """
    if is_hub_id(name):
        return downloaded(name, "model") / parse_hub_id(name).path
    folder = Path(name).expanduser()
    if any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG_NAME)):
        return folder
    if (checkpoint := find_checkpoint(name)) is not None:
        return _weights(checkpoint, name)
    found = "has no config.json" if folder.is_dir() else "does not exist"
    offer = f"write hub:{name} to download it from the hub, or " if looks_like_an_id(name) else ""
    raise ConfigError(
        f"{key}={name!r}: this folder {found}; {offer}use a Hugging Face model folder, a run folder, a checkpoint, "
        f"or one of {', '.join(EMBEDDED_MODELS)}"
    )


def find_checkpoint(name: str) -> Checkpoint | None:
    """Return the verified checkpoint of a run folder, RUN@best or a checkpoint folder; None for other names."""
    path, which = _split(name)
    folder = Path(path).expanduser()
    if (folder / CONFIG_NAME).is_file():
        return _checkpoint_of_run(folder, which or NEWEST)
    if which is None and (folder / MANIFEST_NAME).is_file() and (folder / STATE_NAME).is_file():
        return CheckpointManager(folder.parent).load(folder)
    return None


def resolved_name(name: str, key: str = MODEL_KEY) -> str:
    """Return a name that still means the same model when the newest checkpoint or a hub branch has changed.

    `config.yaml` stores this name.
    """
    if name in EMBEDDED_MODELS:
        return name
    return pinned(name, "model") if is_hub_id(name) else str(model_folder(name, key))


def with_resolved_names(policy: PolicyConfig) -> PolicyConfig:
    """Return the config of a policy with resolved names of model and tokenizer.

    Raises:
        ConfigError: see `model_folder`; also raised if `trust_remote_code` is set for a hub model.
    """
    names = {"model_name": policy.model_name, "tokenizer": policy.tokenizer}
    for key, name in names.items():
        if is_hub_id(name) and policy.trust_remote_code:
            raise ConfigError(
                f"policy.trust_remote_code=true does not apply to policy.{key}={name}, because code is not downloaded; "
                f"set policy.trust_remote_code=false, or read the code and set policy.{key} to a folder that has it"
            )
    return policy.model_copy(
        update={key: resolved_name(name, f"policy.{key}") for key, name in names.items() if name is not None}
    )


def _split(name: str) -> tuple[str, str | None]:
    """Split RUN@best into (RUN, best), unless a folder named RUN@best exists."""
    run, at, which = name.rpartition("@")
    if not at or "/" in which or Path(name).expanduser().exists():
        return name, None
    if which not in (NEWEST, BEST):
        raise ConfigError(f"{name!r} asks for the checkpoint {which!r}; write {run}@{BEST} or {run}@{NEWEST}")
    return run, which


def _checkpoint_of_run(run: Path, which: str) -> Checkpoint:
    if which == NEWEST:
        newest = CheckpointManager(run / CHECKPOINTS_NAME).latest()
        if newest is None:
            raise CheckpointError(f"{run} has no valid checkpoint yet; wait until the run saves one")
        return newest
    settings = merged_settings(run / CONFIG_NAME, resolve=False).get("checkpoint", {})
    metric = settings.get("metric", CheckpointConfig().metric)
    mode = settings.get("mode", CheckpointConfig().mode)
    best = CheckpointManager(run / CHECKPOINTS_NAME, metric=metric, mode=mode).best()
    if best is None:
        raise CheckpointError(
            f"{run} has no valid checkpoint with the metric {metric!r}, so there is no best one; write {run}@{NEWEST}"
        )
    return best


def _weights(checkpoint: Checkpoint, source: str) -> Path:
    folder = checkpoint.path / WEIGHTS
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{source} has no language model; choose a run of `lucidrl grpo` or `lucidrl sft` (`lucidrl play` shows a "
            "trained control policy)"
        )
    return folder
