"""How long a checkpoint stalls training: a background save compared with a blocking save.

A checkpoint holds the weights, the float32 master weights and both moments of AdamW, with hashes and fsync. The stall
is the time of `save` plus the time of the later commit. The memory of the first save is allocated in the background
after the first step, as in a run. The table also shows, without a claim, the duration of a training step while the
thread writes.

Known limit: the first save stalls 2.5 times as long as later ones (0.31 s and 0.12 s; 2.1 s before its memory was
allocated beforehand). Where the rest comes from is not known.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from harness import Claim, arguments, print_table, report
from ranks import make_batch

from lucidrl.algorithms.saver import Saver
from lucidrl.checkpoint.config import CheckpointConfig
from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    options = arguments(
        __doc__,
        model=(str, ".cache/smollm2", "folder of SmolLM2"),
        rounds=(int, 5, "checkpoints per kind of save"),
        folder=(str, tempfile.gettempdir(), "folder for the checkpoints"),
    )
    torch.set_num_threads(options.threads)
    batch = make_batch().slice(0, 2)  # short steps: several run during one save
    config = PolicyConfig(model_name=options.model, precision="bfloat16")
    policy = Policy(config, load_tokenizer(options.model), init_reference_model=False)
    step = lambda: policy.train(batch, NLLLoss())  # noqa: E731
    step()
    plain_s = median(seconds_of(step) for _ in range(options.rounds))
    blocking, stalls, while_writing = [], [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        manager = CheckpointManager(Path(name), keep_last=1)
        waiting = Saver(manager, CheckpointConfig(background=False), policy, lambda message: None)
        saver = Saver(manager, CheckpointConfig(), policy, lambda message: None)
        policy.reserve_save(Path(name))
        for _ in range(options.rounds):
            step()
        first_s = seconds_of(lambda: saver.save(0, {}, {}))
        while not policy.is_save_written():
            step()
        first_s += seconds_of(saver.finish)
        for number in range(options.rounds):
            blocking.append(seconds_of(lambda number=number: waiting.save(2 * number + 1, {}, {})))
            step()  # the previous checkpoint is deleted meanwhile, as in a run
            begin_s = seconds_of(lambda number=number: saver.save(2 * number + 2, {}, {}))
            while not policy.is_save_written():
                while_writing.append(seconds_of(step))
            stalls.append(begin_s + seconds_of(saver.finish))
        newest = manager.root / f"step_{2 * options.rounds}"
        size_gb = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) / 1e9
    rows = [
        (f"blocking save of {size_gb:.2f} GB", f"{median(blocking):.2f} s"),
        ("stall of a background save", f"{median(stalls):.2f} s"),
        ("stall of the first background save", f"{first_s:.2f} s"),
        ("training step", f"{plain_s:.2f} s"),
        ("training step while the thread writes", f"{median(while_writing):.2f} s"),
    ]
    print_table(rows, header=("measurement", "median"))
    ratio = median(stall / blocked for stall, blocked in zip(stalls, blocking, strict=True))
    claims = [
        Claim("stall of a background save / duration of a blocking save", 0.1, ratio, at_most=True),
        Claim("stall of the first background save / of a later one", 2, first_s / median(stalls), at_most=True),
    ]
    report(claims, options.json)


if __name__ == "__main__":
    main()
