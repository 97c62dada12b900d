"""The clipped objective of PPO over frames, and what the critic minimises.

Shapes: N frames.
"""

from __future__ import annotations

import torch

from lucidrl.losses.interfaces import FrameLosses, FrameOutputs, Frames
from lucidrl.losses.ratios import bounded_exp


class ClippedFrameLoss:
    """With r = exp(logprobs - those of the policy that acted) and A the advantage,

        policy loss = mean(max(-A r, -A clip(r, 1 - clip, 1 + clip))) - entropy_coefficient * mean(entropy)
        critic loss = mean((value - value target)²) / 2

    Both are plain means, so that minibatches of equal size average to the whole.
    """

    def __init__(self, clip: float, entropy_coefficient: float):
        self._clip, self._entropy_coefficient = clip, entropy_coefficient

    def __call__(self, outputs: FrameOutputs, frames: Frames) -> FrameLosses:
        log_ratio_N = outputs.logprobs - frames.logprobs
        ratio_N = bounded_exp(log_ratio_N)
        clipped_N = ratio_N.clamp(1 - self._clip, 1 + self._clip)
        loss_policy = torch.maximum(-frames.advantages * ratio_N, -frames.advantages * clipped_N).mean()
        loss_value = 0.5 * (outputs.values - frames.value_targets).square().mean()
        entropy = outputs.entropy.mean()
        with torch.no_grad():
            metrics = {
                "loss_policy": loss_policy.detach(),
                "loss_value": loss_value.detach(),
                "entropy": entropy.detach(),
                # r - 1 - log r: never below 0, and of less variance than -log r.
                "approx_kl": (ratio_N - 1 - log_ratio_N).mean(),
                "clip_fraction": (ratio_N != clipped_N).to(ratio_N.dtype).mean(),
            }
        return FrameLosses(loss_policy - self._entropy_coefficient * entropy, loss_value, metrics)
