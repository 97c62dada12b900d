r"""Write the data of the calculator recipe: arithmetic problems, and conversations that use the calculator.

    python examples/calculator_problems.py calculator-data

`problems.jsonl` has plain arithmetic and six kinds of word problems with their answers, for `lucidrl grpo` and
`lucidrl eval`. `conversations.jsonl` has plain arithmetic and the three kinds with a single operation, each problem
solved with a call of the tool, for `lucidrl sft`. Equal arguments write equal files.
"""

import argparse
import json
import random
from pathlib import Path

TEMPLATES = [
    ("What is {a} * {b}?", "{a} * {b}"),
    ("What is {a} * {b} + {c}?", "{a} * {b} + {c}"),
    ("Compute {a} times {b}, minus {c}.", "{a} * {b} - {c}"),
    ("What is {a} + {b} + {c}?", "{a} + {b} + {c}"),
    ("Compute {a} minus {b}, plus {c}.", "{a} - {b} + {c}"),
    ("A crate holds {a} screws. How many screws do {b} crates hold?", "{a} * {b}"),
    ("A library buys {a} books in May, {b} in June and {c} in July. How many is that?", "{a} + {b} + {c}"),
    ("A shop has {a} apples and sells {b} of them. How many are left?", "{a} - {b}"),
    ("A ticket costs {a} dollars. What do {b} tickets cost, plus a fee of {c} dollars?", "{a} * {b} + {c}"),
    ("A farm has {a} rows of {b} trees. {c} trees are cut down. How many are left?", "{a} * {b} - {c}"),
    ("A tank holds {a} liters. {b} liters are taken out and {c} are added. How much is in it?", "{a} - {b} + {c}"),
]


NUM_SOLVED = 8
"""The first templates occur in conversations. The model must learn the others from rewards."""


def problem(draw: random.Random, templates: list[tuple[str, str]]) -> dict[str, str]:
    """Draw a problem with large numbers, which a small model cannot calculate itself."""
    template, expression = draw.choice(templates)
    numbers = {"a": draw.randint(1200, 9800), "b": draw.randint(110, 990), "c": draw.randint(110, 990)}
    expression = expression.format(**numbers)
    return {"prompt": template.format(**numbers), "expression": expression, "answer": str(eval(expression))}


def conversation(row: dict[str, str]) -> dict[str, list[dict[str, object]]]:
    """Solve a problem with one call of the calculator."""
    call = {"function": {"name": "calculator", "arguments": {"expression": row["expression"]}}}
    return {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": row["answer"]},
            {"role": "assistant", "content": f"The answer is {row['answer']}."},
        ]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=2400, help="rows of problems.jsonl")
    parser.add_argument("--conversations", type=int, default=200, help="rows of conversations.jsonl")
    args = parser.parse_args()
    draw = random.Random(0)
    rows = [problem(draw, TEMPLATES) for _ in range(args.problems)]
    problems = [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
    conversations = [conversation(problem(draw, TEMPLATES[:NUM_SOLVED])) for _ in range(args.conversations)]
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("problems.jsonl", problems), ("conversations.jsonl", conversations)):
        (args.folder / name).write_text("".join(json.dumps(row) + "\n" for row in content))
        print(f"{len(content)} rows in {args.folder / name}")


if __name__ == "__main__":
    main()
