"""GRPO with an LLM judge as the reward. A stand-in for its server runs in this program, so no model server is needed.

python examples/llm_judge.py
python examples/llm_judge.py --base-url http://localhost:8000/v1 --model MODEL

It trains the embedded model on additions for some seconds. With `--base-url`, a real endpoint grades the completions.
"""

import argparse
import json
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lucidrl import GRPOTrainer

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 60) for b in range(10, 40)]
RUBRIC = """\
The task: {{ prompt }}
The right answer: {{ answer }}
The response: {{ completion }}
How many digits are right? Write the number, from {{ min_score }} to {{ max_score }}, as: Score: <number>
"""


class StandIn(BaseHTTPRequestHandler):
    """Replies like an OpenAI-compatible server whose model counts equal digits."""

    def do_GET(self) -> None:
        self._send({"data": [{"id": "stand-in"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        [(answer, response)] = re.findall(r"answer: (.*)\nThe response: (.*)\n", request["messages"][-1]["content"])
        num_right = sum(a == b for a, b in zip(answer, response.strip()[:2], strict=False))
        self._send(
            {"choices": [{"message": {"role": "assistant", "content": f"I compared them.\nScore: {num_right}"}}]}
        )

    def log_message(self, *args: object) -> None:
        pass

    def _send(self, reply: dict) -> None:
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def stand_in() -> Iterator[str]:
    """Run the stand-in; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--base-url", default=None)
    parser.add_argument("--model", default="stand-in")
    args = parser.parse_args(argv)
    with stand_in() as address, tempfile.TemporaryDirectory() as scratch:
        kwargs = {
            "base_url": args.base_url or address,
            "model": args.model,
            "rubric": RUBRIC,
            "max_score": 2,
            "cache_dir": f"{scratch}/replies",
        }
        trainer = GRPOTrainer(
            model="embedded",
            rewards=[{"name": "judge", "kwargs": kwargs}],
            dataset=ROWS,
            prompt="question",
            learning_rate=1.5e-4,
            max_steps=args.steps,
            output=scratch,
            config={"policy": {"generation": {"max_new_tokens": 8}}, "validation": {"num_prompts": 32}},
        )
        metrics = trainer.train().metrics
        print(f"score after {args.steps} steps: {metrics['validation/reward/judge']:.2f}")
        print(f"requests per completion: {metrics['validation/reward/judge/requests']:.2f}")


if __name__ == "__main__":
    main()
