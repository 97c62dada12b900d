"""On-policy distillation: the steps after which the student has the accuracy that GRPO reaches.

The preset `demo` trains the embedded model with GRPO. Its result is the teacher of the preset `distill-demo`, which
starts from the same model and uses as many samples per step.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

from harness import Claim, arguments, report, run_grpo

EVERY = 25


def accuracy_by_step(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["validation/accuracy"] for record in records if "validation/accuracy" in record}


def first_step(accuracies: dict[int, float], target: float) -> float:
    """The first validated step with at least this accuracy; infinity if there is none."""
    return min((step for step, accuracy in accuracies.items() if accuracy >= target), default=math.inf)


def main() -> None:
    options = arguments(__doc__)
    common = [f"num_threads={options.threads}", f"validation.every={EVERY}"]
    with tempfile.TemporaryDirectory() as name:
        teacher = run_grpo(Path(name), ["--preset", "demo", *common])
        settings = ["--preset", "distill-demo", *common, f"teacher.model_name={teacher}"]
        by_grpo = accuracy_by_step(teacher)
        claims = []
        target = by_grpo[max(by_grpo)]
        for divergence in ("top_k", "sampled"):
            student = run_grpo(Path(name) / divergence, [*settings, f"distill.divergence={divergence}"], "distill")
            found = accuracy_by_step(student)
            print(f"{divergence}:", ", ".join(f"{value:.3f} at {step}" for step, value in found.items()), flush=True)
            ratio = first_step(by_grpo, target) / first_step(found, target)
            claims.append(Claim(f"distillation, {divergence}: GRPO's steps to its accuracy, per step", 2.0, ratio))
    print("GRPO:", ", ".join(f"{value:.3f} at {step}" for step, value in by_grpo.items()))
    report(claims, options.json)


if __name__ == "__main__":
    main()
