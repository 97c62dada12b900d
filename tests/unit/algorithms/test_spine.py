"""A reader gets from `GRPO.run` to the model in a few frames: counted on recorded stacks of a run in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import pytest

import lucidrl
from lucidrl.collectors.text import TextCollector
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.logprobs import LogprobModel

PACKAGE = Path(lucidrl.__file__).parent


def described(code: CodeType, line: int) -> str | None:
    """A line of the package, None if it is elsewhere."""
    path = Path(code.co_filename)
    return f"{path.relative_to(PACKAGE)}:{line} {code.co_qualname}" if path.is_relative_to(PACKAGE) else None


def frames_below_the_loop(frame: FrameType | None) -> list[str]:
    """The frames of the package from `GRPO.run` to this one; none if the loop is not below."""
    frames = []
    while frame is not None:
        frames.append(described(frame.f_code, frame.f_lineno))
        if frame.f_code.co_qualname == "GRPO.run":
            return [text for text in reversed(frames) if text]
        frame = frame.f_back
    return []


def short_run(run):
    """Two optimizer steps in one step, so that the log-probabilities before the first are scored."""
    run("grpo", "run", "grpo.max_steps=1", "validation.num_prompts=0", "policy.train_global_batch_size=8")


@pytest.mark.parametrize(
    ("cls", "method", "through", "most_frames"),
    [
        pytest.param(LogprobModel, "forward", "Policy.train", 7, id="training"),
        pytest.param(LogprobModel, "forward", "Policy.with_scores", 7, id="scoring"),
        pytest.param(BuiltinGenerator, "generate", "TextCollector.collect", 7, id="generation"),
    ],
)
def test_the_model_is_a_few_frames_below_the_loop(run, monkeypatch, cls, method, through, most_frames):
    """Both ends count."""
    stacks = []
    call = getattr(cls, method)

    def recorded(*args, **kwargs):
        stacks.append([*frames_below_the_loop(sys._getframe(1)), f"{cls.__name__}.{method}"])
        return call(*args, **kwargs)

    monkeypatch.setattr(cls, method, recorded)
    short_run(run)
    stacks = [stack for stack in stacks if any(frame.endswith(f" {through}") for frame in stack)]
    assert stacks
    deepest = max(stacks, key=len)
    assert len(deepest) <= most_frames, "\n".join(deepest)


@pytest.mark.parametrize("most_calls", [3])
def test_the_version_of_the_policy_is_set_in_a_few_calls(run, monkeypatch, most_calls):
    calls: list[str] = []
    update = TextCollector.update_policy_weights_

    def note(frame, event, argument):
        if event == "call" and (text := described(frame.f_code, frame.f_lineno)):
            calls.append(text)

    def recorded(collector, version):
        calls.clear()
        sys.setprofile(note)
        try:
            update(collector, version)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(TextCollector, "update_policy_weights_", recorded)
    short_run(run)
    assert 1 <= len(calls) <= most_calls, "\n".join(calls)
