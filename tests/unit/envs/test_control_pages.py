"""What the pages on control show, works."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

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
        exec(block, names)
    assert all(batch.shape == torch.Size([8, 125]) for batch in batches)
    for value in names.values():
        if isinstance(value, EnvBase):
            value.close()
