"""GRPO in ten lines: a model, a reward function and rows.

python examples/grpo_in_python.py
python examples/grpo_in_python.py --steps 200 --output FOLDER

It trains the embedded model on additions for some seconds, writes a run folder as `lucidrl grpo` does, and saves the
model.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lucidrl import GRPOTrainer

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 60) for b in range(10, 40)]


def exact(completion: str, answer: str, **row: object) -> float:
    """Reward 1 for the reference answer."""
    return float(completion.strip() == answer)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default=None, help="folder for runs and the model; by default a temporary one")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(args.output or scratch)
        trainer = GRPOTrainer(
            model="embedded",  # or the folder of a Hugging Face model
            rewards=[exact],
            dataset=ROWS,  # or the path of a JSONL, CSV or Parquet file, or a datasets.Dataset
            prompt="question",
            learning_rate=1.5e-4,
            max_steps=args.steps,
            output=output,
            config={"policy": {"generation": {"max_new_tokens": 8}}, "validation": {"num_prompts": 64}},
        )
        result = trainer.train()
        trainer.save(output / "model")
        print(f"accuracy after {result.last_step} steps: {result.metrics['validation/reward']:.2f}")
        print("12+30 is", trainer.generate("12+30=")[0])


if __name__ == "__main__":
    main()
