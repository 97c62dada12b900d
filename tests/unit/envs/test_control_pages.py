"""What the pages on control show, works."""

import re
from pathlib import Path

import pytest
import ray
import torch
from torch import nn

from lucidrl.envs import GymEnv
from lucidrl.envs.base import EnvBase

DOCS = Path(__file__).parents[3] / "docs"


class Actor(nn.Module):
    def forward(self, observation):
        return nn.functional.one_hot((observation[..., 2] > 0).long(), 2)


@pytest.mark.parametrize("page", ["control-environments.md", "collectors.md"])
def test_code_of_the_pages_runs(page):
    batches = []
    names = {"actor": Actor(), "train": batches.append}
    text = (DOCS / page).read_text(encoding="utf-8").replace("total_frames=100_000", "total_frames=2000")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        if "ray.init" not in block and "torchrl" not in block:  # TorchRL is not installed
            exec(block, names)
    assert all(batch.shape == torch.Size([8, 125]) for batch in batches)
    for value in names.values():
        if isinstance(value, EnvBase):
            value.close()


@pytest.mark.slow
def test_code_about_a_ray_cluster_runs():
    text = (DOCS / "collectors.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "ray.init" in block]
    of_this_machine = {
        '"auto"': 'address="local", num_cpus=2, include_dashboard=False',
        "[make_env] * 16": "[make_env] * 2",
        "frames_per_batch=16_000": "frames_per_batch=200",
        "total_frames=10_000_000": "total_frames=400",
    }
    for shown, tried in of_this_machine.items():
        assert shown in block
        block = block.replace(shown, tried)
    batches = []
    exec(block, {"actor": Actor(), "train": batches.append, "make_env": lambda: GymEnv("CartPole-v1")})
    assert [batch.numel() for batch in batches] == [200, 200]
    ray.shutdown()
