"""Transforms of observations, rewards, actions and flags of an env."""

from lucidrl.envs.transforms.base import Compose, Transform
from lucidrl.envs.transforms.env import TransformedEnv
from lucidrl.envs.transforms.episodes import FrameSkip, InitTracker, NoopReset, RewardSum, StepCounter, TimeLimit
from lucidrl.envs.transforms.images import GrayScale, Resize, ToTensorImage
from lucidrl.envs.transforms.masks import ActionMask
from lucidrl.envs.transforms.stacking import CatFrames, CatTensors
from lucidrl.envs.transforms.values import DoubleToFloat, ObservationNorm, RewardClipping, RewardScaling, VecNorm

__all__ = [
    "ActionMask",
    "CatFrames",
    "CatTensors",
    "Compose",
    "DoubleToFloat",
    "FrameSkip",
    "GrayScale",
    "InitTracker",
    "NoopReset",
    "ObservationNorm",
    "Resize",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "StepCounter",
    "TimeLimit",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
    "VecNorm",
]
