"""The mismatch guard: false alarms in clean steps, and its share of a step.

The runs are clean: a separate generator of the embedded model, trained in float32 and in bfloat16. The share is that of
`time/guard_s` in the steps of a short run of SmolLM2 in bfloat16.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from harness import Claim, arguments, read_metrics, report, run_grpo

SEPARATE = ["policy.generation.placement=separate", "validation.num_prompts=0", "checkpoint.every=0"]
SMALL = ["collector.prompts_per_step=2", "collector.samples_per_prompt=2", "policy.generation.max_new_tokens=6"]
MIXED = ["policy.generation.temperature=0.8", "policy.optimizer.kwargs.lr=1e-3", "grpo.loss.entropy_coefficient=0.01"]
WARMUP_STEPS = 1


def clean_run(precision: str, steps: int, threads: int) -> tuple[int, float]:
    """Return the number of alarms and the largest mean difference of a step, in nats."""
    with tempfile.TemporaryDirectory() as name:
        settings = [f"grpo.max_steps={steps}", f"policy.precision={precision}", f"num_threads={threads}"]
        folder = run_grpo(Path(name), [*SEPARATE, *SMALL, *MIXED, *settings])
        lines = (folder / "logs" / "driver.log").read_text().splitlines()
        alarms = sum("nats per token, limit" in line for line in lines)
        return alarms, max(read_metrics(folder, "train/generation_mismatch/mean_abs_logprob_difference"))


def share_of_step(model: str, threads: int) -> float:
    """Return the guard's share of refit and step, in percent."""
    with tempfile.TemporaryDirectory() as name:
        sizes = [
            "collector.prompts_per_step=4",
            "collector.samples_per_prompt=8",
            "policy.generation.max_new_tokens=32",
        ]
        settings = [f"policy.model_name={model}", "policy.precision=bfloat16", "grpo.max_steps=3"]
        folder = run_grpo(Path(name), [*SEPARATE, *sizes, *settings, f"num_threads={threads}"])
        guard_s, step_s = (read_metrics(folder, f"time/{part}_s")[WARMUP_STEPS:] for part in ("guard", "step"))
        refit_s = read_metrics(folder, "time/refit_s")[WARMUP_STEPS:]
        mismatch = read_metrics(folder, "train/generation_mismatch/mean_abs_logprob_difference")
    print("mean mismatch per step, in nats:", ", ".join(f"{value:.3f}" for value in mismatch))
    print("seconds per step:", json.dumps({"guard": guard_s, "refit": refit_s, "step": step_s}))
    return 100 * sum(guard_s) / sum(step_s)


def main() -> None:
    options = arguments(
        __doc__, model=(str, "", "folder of SmolLM2-135M-Instruct; empty: no share"), steps=(int, 500, "clean steps")
    )
    claims = []
    for precision in ("float32", "bfloat16") if options.steps else ():
        alarms, difference = clean_run(precision, options.steps, options.threads)
        print(f"{precision}: {options.steps} clean steps, largest mean difference of a step {difference:.2g} nats")
        claims.append(Claim(f"mismatch guard: false alarms in {precision}", 0, alarms, at_most=True, unit=""))
    if options.model:
        share = share_of_step(options.model, options.threads)
        claims.append(Claim("mismatch guard: share of refit and step", 3, share, at_most=True, unit="%"))
    report(claims, options.json)


if __name__ == "__main__":
    main()
