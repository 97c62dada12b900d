"""The cost of profiling: ranges that are unarmed, disabled, armed and recorded, and spans in a step of the demo.

Ranges are compared with `contextlib.nullcontext` and, while recording, with torch's `record_function`. The variable
that arms ranges is read at import, so armed and unarmed ranges run in separate processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from harness import Claim, arguments, interval_of_median, report, without_spans

LOOPS, REPEATS = 50_000, 15
RECORDED_LOOPS = 3_000


def seconds_of_block(context: Callable[[str], Any], loops: int = LOOPS) -> float:
    """Seconds of one empty block in the context, averaged over the loops."""
    return timeit.timeit("with context('x'): pass", number=loops, globals={"context": context}) / loops


def ratio(context: Callable[[str], Any], reference: Callable[[str], Any], loops: int = LOOPS) -> float:
    """The median ratio of the times of both, which take turns."""
    pairs = [(seconds_of_block(context, loops), seconds_of_block(reference, loops)) for _ in range(REPEATS)]
    return median(ours / theirs for ours, theirs in pairs)


def measure_ranges() -> dict[str, Any]:
    """Measure the ranges of this process, armed or not."""
    import lucidrl
    from lucidrl.profiling import _maybe_record_function, gate, profiled

    def plain() -> None: ...

    measured: dict[str, Any] = {
        "is_plain": profiled("x")(plain) is plain,
        "not_recording": ratio(_maybe_record_function, nullcontext),
    }
    if gate.is_armed:
        lucidrl.set_profiling_enabled(False)
        measured["disabled"] = ratio(_maybe_record_function, nullcontext)
        lucidrl.set_profiling_enabled(True)
        measured |= measure_recording(_maybe_record_function)
    return measured


def measure_recording(range_: Callable[[str], Any]) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile, record_function

    eager = ratio(record_function, nullcontext, RECORDED_LOOPS)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        recording = ratio(range_, record_function, RECORDED_LOOPS)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "x"]
    return {"eager": eager, "recording": recording, "categories": sorted({event["cat"] for event in events})}


def ranges_claims() -> list[Claim]:
    found = {}
    for armed in ("", "1"):
        code = "import json, profiling_cost; print(json.dumps(profiling_cost.measure_ranges()))"
        environment = {**os.environ, "LUCIDRL_PROFILING": armed, "KINETO_LOG_LEVEL": "6"}
        command = [sys.executable, "-c", code]
        output = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent
        ).stdout
        found[armed] = json.loads(output)
    off, on = found[""], found["1"]
    print(f"record_function without a profiler: {on['eager']:.0f}x nullcontext")
    return [
        Claim("unarmed: a decorated function is the function itself", 1, float(off["is_plain"]), unit=""),
        Claim("unarmed range vs nullcontext", 1.3, off["not_recording"], at_most=True),
        Claim("armed and disabled range vs nullcontext", 1.5, on["disabled"], at_most=True),
        Claim("armed range without a profiler vs nullcontext", 3, on["not_recording"], at_most=True),
        Claim("recorded range vs record_function", 1, on["recording"], at_most=True),
        Claim("recorded ranges are user annotations", 1, float(on["categories"] == ["user_annotation"]), unit=""),
    ]


def demo_step(threads: int) -> Callable[[], None]:
    """A function that repeats the demo's first step."""
    import torch

    from lucidrl.algorithms.advantages import compute_advantages
    from lucidrl.collectors.text import TextCollector
    from lucidrl.data.loading import dataset_of_prompts
    from lucidrl.envs.text.registry import make_env
    from lucidrl.envs.text.runner import EnvRunner
    from lucidrl.losses.policy_gradient import ClippedPGLoss
    from lucidrl.models.loading import model_facts, policy_tokenizer
    from lucidrl.models.policy.policy import Policy
    from lucidrl.recipes.configs import GRPORunConfig
    from lucidrl.recipes.settings import preset_path
    from lucidrl.utils.config import load_config

    torch.set_num_threads(threads)
    config = load_config(GRPORunConfig, preset_path("demo"), overrides=["policy.optimizer.kwargs.lr=1e-30"])
    tokenizer = policy_tokenizer(config.policy)
    policy = Policy(config.policy, tokenizer, init_reference_model=False, seed=config.seed)
    env = make_env(config.env.name, config.env.kwargs)
    runner = EnvRunner(env, config.env.timeout_s, config.env.max_concurrency, config.env.on_error)
    prompts = dataset_of_prompts(env.prompts(), config.data, seed=config.seed)
    length = model_facts(config.policy.model_name).context_length
    collector = TextCollector(
        policy, runner, tokenizer, prompts, config.collector, context_length=length, seed=config.seed
    )
    initial_state = collector.state_dict()
    loss_fn = ClippedPGLoss(config.grpo.loss, on_policy=True)

    def step() -> None:
        collector.load_state_dict(initial_state)
        rollouts = collector.collect()
        batch = rollouts.to_batch(tokenizer.pad_token_id)
        batch["advantages"] = compute_advantages(
            config.grpo.advantages, rollouts.rewards, rollouts.group_ids, rollouts.is_valid
        )
        policy.train(batch, loss_fn)

    return step


def spans_claims(pairs: int, threads: int) -> list[Claim]:
    step = demo_step(threads)

    def seconds(is_timed: bool) -> float:
        with nullcontext() if is_timed else without_spans():
            start = time.perf_counter()
            step()
            return time.perf_counter() - start

    for _ in range(3):
        step()
    ratios = []
    for number in range(pairs):
        # The order alternates, so a machine that slows down favours neither.
        order = (True, False) if number % 2 else (False, True)
        measured = {is_timed: seconds(is_timed) for is_timed in order}
        ratios.append(measured[True] / measured[False])
    low, high = interval_of_median(ratios)
    print(f"demo step with spans vs without, {pairs} pairs: {median(ratios):.4f}, 95% interval [{low:.4f}, {high:.4f}]")
    return [Claim("demo step with spans vs without: lower end of the interval", 1, low, at_most=True)]


def main() -> None:
    options = arguments(__doc__, pairs=(int, 40, "pairs of demo steps"))
    report(ranges_claims() + spans_claims(options.pairs, options.threads), options.json)


if __name__ == "__main__":
    main()
