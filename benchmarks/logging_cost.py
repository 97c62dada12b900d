"""The cost of logging: the caller's time for metrics and rows compared with plain code, and its share of a demo step.

Plain code is `SummaryWriter.add_scalar` for each metric, and a loop of `tolist` and `json.dumps` over rows.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from harness import Claim, arguments, read_metrics, report, run_grpo
from torch.utils.tensorboard import SummaryWriter

from lucidrl.utils.logger import Logger

NUM_METRICS = 50
ROWS, TOKENS = 512, 1024
ALL_BACK_ENDS = [
    "tracking.wandb.enabled=true",
    "tracking.wandb.mode=offline",
    "tracking.mlflow.enabled=true",
    "tracking.trackio.enabled=true",
]


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def metrics_claims(folder: Path, calls: int) -> list[Claim]:
    """Calls take turns. A pause after each lets its threads write, as they do during a training step."""
    values = {f"metric_{number}": number / 3 for number in range(NUM_METRICS)}
    plain_writer = SummaryWriter(str(folder / "plain"))

    def plain(step: int) -> None:
        for name, value in values.items():
            plain_writer.add_scalar(f"train/{name}", value, step)

    ours, theirs = [], []
    with Logger({"log_dir": str(folder / "ours"), "tensorboard_enabled": True}) as logger:
        for step in range(calls):
            ours.append(seconds_of(lambda step=step: logger.log_metrics(values, step, prefix="train")))
            time.sleep(0.01)
            theirs.append(seconds_of(lambda step=step: plain(step)))
            time.sleep(0.01)
    plain_writer.close()
    print(f"log_metrics, {NUM_METRICS} scalars: {median(ours) * 1e6:.0f} us, plain {median(theirs) * 1e6:.0f} us")
    text = f"log_metrics of {NUM_METRICS} scalars: SummaryWriter's time / caller's time"
    return [Claim(text, 12, median(theirs) / median(ours))]


def rows_claims(folder: Path, rounds: int) -> list[Claim]:
    generator = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(0, 50_000, (ROWS, TOKENS), generator=generator),
        "input_lengths": torch.full((ROWS,), TOKENS),
        "generation_logprobs": -torch.rand(ROWS, TOKENS, generator=generator),
        "prev_logprobs": -torch.rand(ROWS, TOKENS, generator=generator),
        "text": ["some text of a sample"] * ROWS,
    }

    def plain() -> None:
        with (folder / "plain.jsonl").open("w") as file:
            for index in range(ROWS):
                row = {k: v[index].tolist() if isinstance(v, torch.Tensor) else v[index] for k, v in batch.items()}
                file.write(json.dumps({**row, "idx": index}) + "\n")

    caller, total, theirs = [], [], []
    for _ in range(rounds + 1):  # the first is a warmup
        logger = Logger({"log_dir": str(folder / "rows")})
        start = time.perf_counter()
        caller.append(seconds_of(lambda logger=logger: logger.log_batched_dict_as_jsonl(batch, "rows.jsonl")))
        logger.finish()
        total.append(time.perf_counter() - start)
        theirs.append(seconds_of(plain))
    ours = [json.loads(line) for line in (folder / "rows" / "rows.jsonl").open()]
    assert ours[7]["input_ids"] == batch["input_ids"][7].tolist(), "the rows differ"
    print(
        f"{ROWS} x {TOKENS} tokens: caller {median(caller[1:]) * 1e3:.1f} ms, total {median(total[1:]) * 1e3:.0f} ms, "
        f"plain {median(theirs[1:]) * 1e3:.0f} ms"
    )
    text = f"log_batched_dict_as_jsonl of {ROWS} x {TOKENS} tokens: "
    return [
        Claim(f"{text}plain loop's time / caller's time", 20, median(theirs[1:]) / median(caller[1:])),
        Claim(f"{text}plain loop's time / total time", 3, median(theirs[1:]) / median(total[1:])),
    ]


def demo_claims(folder: Path, steps: int) -> list[Claim]:
    run = run_grpo(folder, ["--preset", "demo", f"grpo.max_steps={steps}", *ALL_BACK_ENDS])
    caller_s, step_s = read_metrics(run, "logger/caller_s"), read_metrics(run, "time/step_s")
    background_s = read_metrics(run, "logger/background_cpu_s")
    print(
        f"demo, {steps} steps, all back ends: caller {sum(caller_s) / steps * 1e3:.2f} ms per step of "
        f"{sum(step_s) / steps * 1e3:.0f} ms, background CPU {sum(background_s) / steps * 1e3:.1f} ms per step"
    )
    share = 100 * sum(caller_s) / sum(step_s)
    lost = read_metrics(run, "logger/lost_records")[-1]
    return [
        Claim(
            "demo with all back ends: caller's time in the logger, share of a step", 2, share, at_most=True, unit="%"
        ),
        Claim("demo with all back ends: lost records", 0, lost, at_most=True, unit=""),
    ]


def main() -> None:
    options = arguments(
        __doc__,
        calls=(int, 200, "calls of log_metrics"),
        rounds=(int, 5, "batches of rows"),
        steps=(int, 60, "steps of the demo"),
    )
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        claims = metrics_claims(folder, options.calls) + rows_claims(folder, options.rounds)
        claims += demo_claims(folder / "demo", options.steps)
    report(claims, options.json)


if __name__ == "__main__":
    main()
