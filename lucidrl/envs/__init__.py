"""Environments: those of control tasks are here, text environments are in `lucidrl.envs.text`.

Names are imported at first use, so reading settings does not import torch.
"""

from lucidrl.utils.imports import names_imported_at_use

_TRANSFORMS = (
    "ActionMask CatFrames CatTensors Compose DoubleToFloat FrameSkip GrayScale InitTracker NoopReset ObservationNorm "
    "Resize RewardClipping RewardScaling RewardSum StepCounter TimeLimit ToTensorImage Transform TransformedEnv VecNorm"
)
_SPECS = "Binary Bounded Categorical Composite MultiCategorical MultiOneHot OneHot Spec Unbounded"
_HOMES = {
    "EnvBase": "lucidrl.envs.base",
    "EnvCreator": "lucidrl.envs.creator",
    "GymEnv": "lucidrl.envs.gym",
    "ParallelEnv": "lucidrl.envs.parallel",
    "SerialEnv": "lucidrl.envs.serial",
    "check_env_specs": "lucidrl.envs.checks",
    **dict.fromkeys(_SPECS.split(), "lucidrl.envs.specs"),
    **dict.fromkeys(_TRANSFORMS.split(), "lucidrl.envs.transforms"),
}

__all__ = list(_HOMES)
__getattr__ = names_imported_at_use(__name__, _HOMES)
