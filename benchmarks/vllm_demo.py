"""The demo trained with vLLM and with the built-in engine: held-out accuracy, each with the same seeds.

vLLM is not in the environment of `make bench`: run this with the environment of `make vllm`. The engines draw other
random numbers, so runs of a seed differ by chance.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean, stdev

from harness import Claim, arguments, print_table, read_metrics, report, run_grpo

ENGINES = {
    "built-in": ["policy.generation.placement=policy"],
    "vLLM": ["policy.generation.engine=vllm", "policy.generation.placement=separate"],
}
T_QUANTILES = {2: 4.30, 3: 2.78, 4: 2.45, 5: 2.31}
"""Number of seeds → multiple of its standard error up to which a difference of means is noise: the 97.5 % quantile of
Student's t."""


def accuracies(engine: str, seed: int, steps: int, threads: int) -> list[float]:
    """Held-out accuracy of a run before, in the middle and after training."""
    schedule = [f"grpo.max_steps={steps}", f"validation.every={steps // 2}", "checkpoint.every=0"]
    with tempfile.TemporaryDirectory() as name:
        settings = [*ENGINES[engine], *schedule, f"seed={seed}", f"num_threads={threads}"]
        folder = run_grpo(Path(name), ["--preset", "demo", *settings])
        alarms = (folder / "warnings.jsonl").read_text() if (folder / "warnings.jsonl").exists() else ""
        assert "mismatch" not in alarms, alarms
        return read_metrics(folder, "validation/accuracy")


def main() -> None:
    options = arguments(__doc__, steps=(int, 100, "training steps"), seeds=(str, "1,2,3,4,5", "separated by commas"))
    last: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    table = []
    for seed in map(int, options.seeds.split(",")):
        for engine in ENGINES:
            values = accuracies(engine, seed, options.steps, options.threads)
            last[engine].append(values[-1])
            table.append((engine, str(seed), *(f"{value:.3f}" for value in values)))
            print(*table[-1], flush=True)
    print_table(table, ("engine", "seed", "step 0", f"step {options.steps // 2}", f"step {options.steps}"))
    ours, theirs = last.values()
    if len(ours) not in T_QUANTILES:
        return
    error = (stdev(ours) ** 2 / len(ours) + stdev(theirs) ** 2 / len(theirs)) ** 0.5
    difference = abs(mean(ours) - mean(theirs))
    print(f"mean {mean(ours):.3f} and {mean(theirs):.3f}, standard error of the difference {error:.3f}")
    text = f"demo with vLLM: difference of mean accuracy, {len(ours)} seeds"
    report([Claim(text, T_QUANTILES[len(ours)] * error, difference, at_most=True, unit="")], options.json)


if __name__ == "__main__":
    main()
