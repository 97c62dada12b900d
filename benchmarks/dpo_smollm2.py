"""DPO on a pretrained chat model: the held-out preference accuracy before and after 20 steps.

SmolLM2-135M-Instruct with the preset `dpo`, on the 400 pairs of examples/preference_pairs.py: brief answers over
long-winded ones. 36 pairs are held out by their question; each step has 8 pairs. Before the first step, policy and
reference policy are equal, so the accuracy is 0.5.
"""

from __future__ import annotations

import json
import runpy
import tempfile
from pathlib import Path

from harness import Claim, arguments, read_metrics, report, run_grpo

STEPS = 20
PAIRS = Path(__file__).parents[1] / "examples" / "preference_pairs.py"


def main() -> None:
    options = arguments(__doc__, model=(str, ".cache/smollm2", "folder of the model"))
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "preferences.jsonl"
        rows = runpy.run_path(str(PAIRS))["preferences"]()
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        claims = []
        for loss in ("dpo", "ipo", "kto"):
            settings = [f"policy.model_name={options.model}", f"data.file={file}", f"num_threads={options.threads}"]
            settings += [f"dpo.loss={loss}", f"dpo.max_steps={STEPS}", "dpo.examples_per_step=8"]
            settings += ["validation.num_prompts=40", "validation.every=10", "checkpoint.every=0"]
            folder = run_grpo(Path(name) / loss, [*settings, "checkpoint.final=false"], "dpo")
            accuracies = read_metrics(folder, "validation/accuracy")
            print(f"{loss}: held-out accuracy {', '.join(f'{value:.3f}' for value in accuracies)}", flush=True)
            text = f"SmolLM2, {loss}: held-out preference accuracy after {STEPS} steps"
            claims.append(Claim(text, 0.8, accuracies[-1], unit=""))
    report(claims, options.json)


if __name__ == "__main__":
    main()
