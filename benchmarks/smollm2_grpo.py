"""GRPO on a pretrained chat model: the reward rises within 20 steps, with every seed.

SmolLM2-135M-Instruct with the preset `chat`. The benchmark compares the mean reward of the last 5 steps with that of
the first 5. It takes many minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean

from harness import Claim, arguments, read_metrics, report, run_grpo

STEPS, WINDOW = 20, 5


def gain(model: str, seed: int, threads: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        overrides = [f"policy.model_name={model}", f"seed={seed}", f"grpo.max_steps={STEPS}", f"num_threads={threads}"]
        folder = run_grpo(Path(name), ["--preset", "chat", *overrides, "validation.num_prompts=0"])
        rewards = read_metrics(folder, "train/reward")
    first, last = fmean(rewards[:WINDOW]), fmean(rewards[-WINDOW:])
    print(f"seed {seed}: reward {first:.3f} in the first {WINDOW} steps, {last:.3f} in the last", flush=True)
    return last - first


def main() -> None:
    options = arguments(
        __doc__,
        model=(str, ".cache/smollm2", "folder of the model"),
        seeds=(str, "0,1,2", "seeds, separated by commas"),
    )
    seeds = [int(seed) for seed in options.seeds.split(",")]
    better = sum(gain(options.model, seed, options.threads) > 0 for seed in seeds)
    text = f"SmolLM2: seeds (of {len(seeds)}) whose reward rises within {STEPS} steps"
    report([Claim(text, len(seeds), better, unit="")], options.json)


if __name__ == "__main__":
    main()
