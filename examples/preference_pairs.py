"""Write a small file of preferences: brief, polite answers over long-winded ones.

    python examples/preference_pairs.py preferences.jsonl
    lucidrl dpo policy.model_name=FOLDER data.file=preferences.jsonl

Both completions of a pair give the same answer; the rejected one wraps it in phrases. The file holds 400 pairs with
different questions.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

CAPITALS = {
    **{"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo", "Egypt": "Cairo"},
    **{"Italy": "Rome", "Cuba": "Havana", "Spain": "Madrid", "Chile": "Santiago", "Ghana": "Accra", "Iran": "Tehran"},
    **{"Greece": "Athens", "Poland": "Warsaw", "Austria": "Vienna", "Portugal": "Lisbon", "Finland": "Helsinki"},
}
OPPOSITES = {
    **{"hot": "cold", "big": "small", "early": "late", "open": "closed", "wet": "dry", "light": "dark", "up": "down"},
    **{"fast": "slow", "old": "new", "full": "empty", "rich": "poor", "hard": "soft", "high": "low", "near": "far"},
}
OPENINGS = (
    "Well, that is a truly fascinating question, and I am so glad that you asked it!",
    "Let me think about this for a while, because there are many ways to look at it.",
    "As someone who has thought about such questions for a long time, I would like to say this:",
    "Before I answer, allow me to point out how interesting this subject really is.",
)
ENDINGS = (
    "Of course there is a lot more that could be said about it, and I could go on for hours.",
    "I hope that this helps, and please do not hesitate to ask me many more questions like it!",
    "There are many other facts about this that may or may not be of interest to you.",
    "It is always a good idea to think about such things again and again.",
)
POLITE = ("Sure: {}.", "Of course: {}.", "Gladly: {}.", "Certainly: {}.")


def questions() -> Iterator[tuple[str, str]]:
    """Yield questions with their answers."""
    for country, capital in CAPITALS.items():
        yield f"What is the capital of {country}?", capital
    for word, opposite in OPPOSITES.items():
        yield f"What is the opposite of {word}?", opposite
    for first in range(2, 30):
        for second in range(first, 30):
            yield f"What is {first} plus {second}?", str(first + second)


def preferences(num_pairs: int = 400, seed: int = 0) -> list[dict[str, str]]:
    """Return rows with `prompt`, `chosen` and `rejected`."""
    generator = random.Random(seed)
    found = list(questions())
    generator.shuffle(found)
    return [
        {
            "prompt": question,
            "chosen": generator.choice(POLITE).format(answer),
            "rejected": f"{generator.choice(OPENINGS)} The answer is {answer}. {generator.choice(ENDINGS)}",
        }
        for question, answer in found[:num_pairs]
    ]


if __name__ == "__main__":
    rows = preferences()
    Path(sys.argv[1]).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} preferences")
