"""Run-time spans: how long each phase of a run takes, on a clock that all processes share.

    with span("rollout"):
        with span("generate"):
            ...
    recorder.drain()  # {"rollout": SpanTotal(seconds=1.3, count=1), "generate": SpanTotal(seconds=1.2, count=1)}
    recorder.take_exclusive()  # {("rollout", "rollout"): 0.1, ("rollout", "generate"): 1.2}

    @span("refit")
    def broadcast(self): ...

A span costs about a microsecond, so phases are always timed; profilers show the spans too. Durations come from the
monotonic clock. Start times are that clock plus one wall-clock anchor per process, so that processes are comparable.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.autograd import profiler as torch_profiler

from lucidrl.profiling.clock import now_ns, unix_ns
from lucidrl.profiling.settings import NSYS_SESSION

P = ParamSpec("P")
R = TypeVar("R")

NOT_RECORDED: AbstractContextManager[None] = nullcontext()
"""The context of a block that no profiler records; one shared object."""

# Like `torch.profiler.record_function`, but without the dispatcher, in a third of the time.
_enter: Any = torch._C._autograd._record_function_with_args_enter
_exit: Any = torch._C._autograd._record_function_with_args_exit


def is_under_nsys() -> bool:
    """Whether Nsight Systems runs this process and the process has a GPU."""
    return NSYS_SESSION in os.environ and torch.cuda.is_available()


_emits_nvtx = is_under_nsys()


def recorded(name: str) -> AbstractContextManager[None]:
    """A context manager that names its block in the current trace; `NOT_RECORDED` if no profiler records."""
    # Read the flag of the process: a profiler of all threads does not set the flag of any thread.
    if torch_profiler._is_profiler_enabled or _emits_nvtx:
        return _RecordedBlock(name)
    return NOT_RECORDED


class _RecordedBlock:
    """A class, because a generator context manager costs more than the block itself."""

    __slots__ = ("_handle", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _emits_nvtx:
            torch.cuda.nvtx.range_push(self._name)
        self._handle = _enter(self._name)

    def __exit__(self, *exc_info: object) -> None:
        _exit(self._handle)
        if _emits_nvtx:
            torch.cuda.nvtx.range_pop()


class SpanTotal(NamedTuple):
    """Total of the spans of one name."""

    seconds: float
    count: int  # type: ignore[assignment] # hides tuple.count, which is not used


class Span(NamedTuple):
    """One finished span."""

    name: str
    start_ns: int
    """Unix time in nanoseconds."""
    duration_ns: int
    thread: int
    """Native thread id, as in torch's traces."""
    thread_name: str


class Count(NamedTuple):
    """The value of a counter from one moment on."""

    name: str
    time_ns: int
    """Unix time in nanoseconds."""
    value: float


class SpanRecorder:
    """Adds up spans by name; thread-safe."""

    def __init__(self) -> None:
        self._local = _Local()
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, int]] = {}
        self._drained: dict[str, tuple[int, int]] = {}
        self._buffer: deque[Span | Count] | None = None

    def span(self, name: str) -> _OpenSpan:
        """A context manager that times its block, or a decorator that times calls, even if they raise.

        Nested spans each count their whole duration. A span inside a span of the same name is not counted: a driver and
        its in-process worker may both name a phase.
        """
        return _OpenSpan(self, name)

    def drain(self) -> dict[str, SpanTotal]:
        """Totals of the spans that have finished since the last call, by name."""
        with self._lock:
            before, self._drained = self._drained, dict(self._totals)
            return _since(before, self._drained)

    def totals(self) -> dict[str, SpanTotal]:
        """Totals of all finished spans."""
        with self._lock:
            return _since({}, self._totals)

    def take_exclusive(self) -> dict[tuple[str, str], float]:
        """Exclusive seconds of the spans of this thread that have finished since its last call.

        The exclusive time of a span is its duration without the spans inside it, so the values never count a moment
        twice. The key is (name of the outermost open span, name of the span).
        """
        spans = self._local.spans
        taken, spans.exclusive_ns = spans.exclusive_ns, {}
        return {key: duration_ns / 1e9 for key, duration_ns in taken.items()}

    def keep_spans(self, capacity: int) -> None:
        """From now on, keep the newest `capacity` spans and counts for `take_spans`; 0 keeps none."""
        with self._lock:
            self._buffer = deque(maxlen=capacity) if capacity else None

    def take_spans(self) -> list[Span | Count]:
        """The spans and counts kept since the last call, spans in the order in which they ended."""
        with self._lock:
            spans = list(self._buffer or ())
            if self._buffer is not None:
                self._buffer.clear()
        return spans

    def count(self, name: str, value: float) -> None:
        """Set a counter, such as the length of a queue, to a new value; costs nothing unless spans are kept."""
        if self._buffer is None:
            return
        with self._lock:
            if self._buffer is not None:
                self._buffer.append(Count(name, now_ns(), value))

    def reset(self) -> None:
        """Drop all finished spans."""
        # A forked child may inherit a held lock, and open spans that its parent ends.
        self._lock = threading.Lock()
        self._local = _Local()
        self._totals, self._drained = {}, {}
        if self._buffer is not None:
            self._buffer.clear()

    def _finish(self, name: str, start: int, duration_ns: int) -> None:
        with self._lock:
            total_ns, count = self._totals.get(name, (0, 0))
            self._totals[name] = (total_ns + duration_ns, count + 1)
            if self._buffer is not None:
                thread = threading.current_thread()
                self._buffer.append(Span(name, unix_ns(start), duration_ns, threading.get_native_id(), thread.name))


def _since(before: dict[str, tuple[int, int]], totals: dict[str, tuple[int, int]]) -> dict[str, SpanTotal]:
    """Totals of the spans that finished after `before`."""
    found = {}
    for name, (duration_ns, count) in totals.items():
        before_ns, count_before = before.get(name, (0, 0))
        if count > count_before:
            found[name] = SpanTotal((duration_ns - before_ns) / 1e9, count - count_before)
    return found


class _ThreadSpans:
    """The open spans of a thread, outermost first, and its exclusive times."""

    __slots__ = ("exclusive_ns", "inner_ns", "names")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.inner_ns: list[int] = []
        """For each open span, the duration of the finished spans directly inside it."""
        self.exclusive_ns: dict[tuple[str, str], int] = {}


class _Local(threading.local):
    """Has only one attribute, because reading one is slow."""

    def __init__(self) -> None:
        self.spans = _ThreadSpans()


class _OpenSpan:
    """One use of `SpanRecorder.span`. A class, because a generator context manager costs twice as much."""

    __slots__ = ("_is_inner", "_name", "_recorder", "_shown", "_spans", "_start")

    def __init__(self, recorder: SpanRecorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def __enter__(self) -> None:
        spans = self._spans = self._recorder._local.spans
        self._is_inner = self._name in spans.names
        if self._is_inner:
            return
        spans.names.append(self._name)
        spans.inner_ns.append(0)
        self._shown = recorded(self._name)
        self._shown.__enter__()
        self._start = time.perf_counter_ns()

    def __exit__(self, *exc_info: object) -> None:
        if self._is_inner:
            return
        duration_ns = time.perf_counter_ns() - self._start
        self._shown.__exit__(None, None, None)  # a range ignores the exception
        spans = self._spans
        key = (spans.names[0], self._name)
        spans.names.pop()
        own_ns = duration_ns - spans.inner_ns.pop()
        spans.exclusive_ns[key] = spans.exclusive_ns.get(key, 0) + own_ns
        if spans.inner_ns:
            spans.inner_ns[-1] += duration_ns
        self._recorder._finish(self._name, self._start, duration_ns)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with _OpenSpan(self._recorder, self._name):
                return function(*args, **kwargs)

        return timed


recorder = SpanRecorder()
"""The recorder of this process."""

span = recorder.span

# A forked child must neither report its parent's spans nor wait for a lock held at the fork.
os.register_at_fork(after_in_child=recorder.reset)
