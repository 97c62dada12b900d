"""Supervised fine-tuning, then GRPO on its result, then the model in plain transformers.

python examples/sft_then_grpo.py
python examples/sft_then_grpo.py --sft-steps 60 --grpo-steps 60 --output FOLDER

The embedded model has never sorted digits, so GRPO alone would find little reward. Some supervised steps teach it the
form of the task; GRPO then raises the reward.
"""

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from lucidrl import GRPOTrainer, SFTTrainer

ROWS = [
    {"question": f"sort {''.join(digits)}=", "answer": "".join(sorted(digits))}
    for digits in itertools.product("0123456789", repeat=3)
]
SHORT = {
    "policy": {"precision": "float32", "generation": {"max_new_tokens": 8}},
    "validation": {"num_prompts": 64},
}


def in_place(completion: str, answer: str, **row: object) -> float:
    """Reward the share of digits in the right place; 0 for another number of digits."""
    digits = completion.strip()
    same = sum(given == wanted for given, wanted in zip(digits, answer, strict=False))
    return same / len(answer) if len(digits) == len(answer) else 0.0


def train(output: Path, sft_steps: int, grpo_steps: int) -> Path:
    """Train in two runs; return the folder of the model."""
    sft = SFTTrainer(
        "embedded",
        dataset=ROWS[::2],
        prompt="question",
        completion="answer",
        learning_rate=1e-3,
        max_steps=sft_steps,
        output=output,
        config=SHORT,
    )
    sft.train()
    sft.save(output / "after-sft")
    grpo = GRPOTrainer(
        output / "after-sft",
        rewards=in_place,
        dataset=ROWS,
        prompt="question",
        learning_rate=1.5e-4,
        max_steps=grpo_steps,
        output=output,
        config={**SHORT, "collector": {"prompts_per_step": 32, "samples_per_prompt": 8}},
    )
    result = grpo.train()
    first, last = grpo.metrics[0]["validation/reward"], result.metrics["validation/reward"]
    print(f"held-out reward: {first:.2f} after SFT, {last:.2f} after GRPO")
    grpo.save(output / "after-grpo")
    return output / "after-grpo"


def complete(model_folder: Path, prompt: str) -> str:
    """Complete a prompt with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft-steps", type=int, default=40)
    parser.add_argument("--grpo-steps", type=int, default=20)
    parser.add_argument("--output", default=None, help="folder for runs and models; by default a temporary one")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = train(Path(args.output or scratch), args.sft_steps, args.grpo_steps)
        print(f"sort 312= is {complete(folder, 'sort 312=')}")


if __name__ == "__main__":
    main()
