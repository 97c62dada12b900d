"""Transforms of images.

Shapes: H height, W width, C channels, after any leading dims. Envs return uint8 [H, W, C]; transforms after
ToTensorImage take floats [C, H, W].
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from lucidrl.envs.failures import at_least_one
from lucidrl.envs.specs import Spec
from lucidrl.envs.transforms.base import Keys, Transform, mapped_spec
from lucidrl.errors import ConfigError

# Luma weights of red, green and blue (ITU-R BT.601).
_BRIGHTNESS = (0.299, 0.587, 0.114)

Interpolation = Literal["nearest", "bilinear", "bicubic", "area"]


class ToTensorImage(Transform):
    """Converts uint8 [H, W, C] images to float32 [C, H, W] between 0 and 1."""

    def __init__(self, in_keys: Keys = ("pixels",), out_keys: Keys | None = None):
        super().__init__(in_keys, out_keys)

    def forward(self, value: np.ndarray) -> np.ndarray:
        return np.moveaxis(value, -1, -3) / np.float32(255)

    def transform_spec(self, spec: Spec) -> Spec:
        if spec.dtype != torch.uint8 or len(spec.shape) < 3:
            raise ConfigError(f"ToTensorImage reads {spec}; it needs uint8 images of [height, width, channels]")
        return mapped_spec(spec, self.forward)


class GrayScale(Transform):
    """Converts [3, H, W] images to [1, H, W] of the same brightness."""

    def __init__(self, in_keys: Keys = ("pixels",), out_keys: Keys | None = None):
        super().__init__(in_keys, out_keys)

    def forward(self, value: np.ndarray) -> np.ndarray:
        red, green, blue = (value[..., channel : channel + 1, :, :] for channel in range(3))
        return _BRIGHTNESS[0] * red + _BRIGHTNESS[1] * green + _BRIGHTNESS[2] * blue

    def transform_spec(self, spec: Spec) -> Spec:
        _check_image(self, spec)
        if spec.shape[-3] != 3:
            raise ConfigError(f"GrayScale reads {spec}, which has {spec.shape[-3]} channels; it needs 3 channels")
        return mapped_spec(spec, self.forward)


class Resize(Transform):
    """Resizes [C, H, W] images to height `h` and width `w`.

    Args:
        w: new width.
        h: new height; by default the width.
        interpolation: interpolation mode of torch; "area" is best for shrinking images.
    """

    def __init__(
        self,
        w: int,
        h: int | None = None,
        interpolation: Interpolation = "bilinear",
        in_keys: Keys = ("pixels",),
        out_keys: Keys | None = None,
    ):
        super().__init__(in_keys, out_keys)
        self.w, self.h = at_least_one("w", w), at_least_one("h", w if h is None else h)
        self.interpolation = interpolation
        if interpolation not in Interpolation.__args__:  # type: ignore[attr-defined]
            raise ConfigError(f"interpolation={interpolation!r} is unknown; give nearest, bilinear, bicubic or area")

    def forward(self, value: np.ndarray) -> np.ndarray:
        images = torch.from_numpy(np.ascontiguousarray(value)).reshape(-1, *value.shape[-3:])
        resized = functional.interpolate(images, (self.h, self.w), mode=self.interpolation)
        # Rounding and bicubic interpolation can leave the range of the image.
        resized = resized.clamp(images.amin((-3, -2, -1), keepdim=True), images.amax((-3, -2, -1), keepdim=True))
        return resized.numpy().reshape(*value.shape[:-2], self.h, self.w)

    def transform_spec(self, spec: Spec) -> Spec:
        _check_image(self, spec)
        return mapped_spec(spec, self.forward)


def _check_image(transform: Transform, spec: Spec) -> None:
    if not spec.dtype.is_floating_point or len(spec.shape) < 3:
        name = type(transform).__name__
        raise ConfigError(f"{name} reads {spec}; it needs float images of [C, H, W]: put ToTensorImage before it")
