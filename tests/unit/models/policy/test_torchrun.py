"""Workers that torchrun starts, without a driver."""

import subprocess
import sys

import pytest

SCRIPT = """
import pathlib
import sys
import torch
from lucidrl.losses.nll import NLLLoss
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker

worker = DTensorPolicyWorker(PolicyConfig(model_name="embedded"), embedded_tokenizer())
rows = BatchedDataDict({
    "input_ids": torch.arange(6, 18).view(2, 6) + worker.rank,
    "input_lengths": torch.tensor([6, 4]),
    "token_mask": torch.ones(2, 6),
    "sample_mask": torch.ones(2),
})
result = worker.train(rows, NLLLoss())
sequences = int(result["all_mb_metrics"]["global_valid_seqs"][0])
line = f"{worker} {result['global_loss'].item():.6f} {sequences}"
pathlib.Path(sys.argv[1], f"rank_{worker.rank}").write_text(line)
worker.shutdown()
"""


@pytest.mark.slow
def test_torchrun_starts_ranks_that_train_together(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += [str(tmp_path / "train.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    # Rarely, gloo aborts at exit, after all results are written.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr
    first, second = ((tmp_path / f"rank_{rank}").read_text() for rank in range(2))
    assert first.startswith("DTensorPolicyWorker[rank=0] ")
    assert second.startswith("DTensorPolicyWorker[rank=1] ")
    assert first.split()[1:] == second.split()[1:]
    assert first.split()[2] == "4"
