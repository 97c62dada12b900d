"""Outcomes of a call to a worker (it returned, raised or exited), and the error message for each failure."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lucidrl.errors import LostWorkerError, LucidError, WorkerError
from lucidrl.profiling.worker_times import CallTimes

if TYPE_CHECKING:
    from lucidrl.distributed.workers.interfaces import NodeLost, WorkerLabel, WorkerReport
    from lucidrl.distributed.workers.messages import Message
    from lucidrl.distributed.workers.processes import Workers

START = "the start"
"""The phase before the first call."""
IDLE = "the wait for its next call"
"""The phase between two calls."""


@dataclass(frozen=True)
class Returned:
    """The call returned."""

    value: Any
    times: CallTimes | None = None
    """What the worker did during the call."""


@dataclass(frozen=True)
class Raised:
    """The call raised."""

    summary: str
    """Type and message."""
    trace: str
    lucid_error: LucidError | None
    """The exception itself, if it is a `LucidError` and can be pickled."""


@dataclass(frozen=True)
class Exited:
    """The process exited before it replied."""

    how: str = "exited"
    """Verb and cause, for instance `exited with code 3`."""


Outcome = Returned | Raised | Exited
"""A worker without an outcome at the timeout has timed out."""


class RemoteTraceback(Exception):  # noqa: N818 - the cause of an error, never raised by itself
    """The traceback of another process, as text."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


def describe_error(error: BaseException) -> Raised:
    """Convert an exception, which may not be picklable, for the driver to report."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    return Raised(summary, trace, error if isinstance(error, LucidError) and _can_be_pickled(error) else None)


def outcome_of(reply: Message | Exited) -> Outcome:
    """Unpickle a reply."""
    if isinstance(reply, Exited):
        return reply
    try:
        return reply.content()
    except Exception as error:
        return Raised(f"the result cannot be unpickled: {type(error).__name__}: {error}", "", None)


def explain_failure(phase: str, timeout_s: float, outcomes: Mapping[int, Outcome], workers: Workers) -> LucidError:
    """The error to raise for workers of which at least one did not return.

    The root cause is, in this order: a worker that exited, even if another one failed first in a collective; a
    `LucidError`; the first other error; the timeout.

    Raises:
        NodeLost: if the cause turns out to be a lost node.
    """
    for number, outcome in outcomes.items():
        if isinstance(outcome, Exited):
            return _exited(outcome, number, workers, phase)
    late = [label.rank for label in workers.labels if label.rank not in outcomes]
    raised = [(number, outcome) for number, outcome in outcomes.items() if isinstance(outcome, Raised)]
    raised.sort(key=lambda pair: pair[1].lucid_error is None)
    if raised:
        number, outcome = raised[0]
        return _raised(outcome, number, late, workers, phase)
    return _timed_out(late, workers, phase, timeout_s)


def explain_loss(lost: NodeLost, phase: str, labels: Sequence[WorkerLabel]) -> WorkerError:
    """The one error to raise for a node that was lost with all its workers."""
    of_node = [labels[rank] for rank in lost.ranks]
    last_lines = [_last_lines(label, tail) for label, tail in zip(of_node, lost.tails, strict=False)]
    error = LostWorkerError(
        f"node {lost.node} with {_listed(of_node)} of {_total(labels)} was lost in {phase}: {lost}"
        f"{_and_all_killed(labels)}{''.join(last_lines)}"
    )
    error.__cause__, error.node = lost.__cause__, lost.node
    return error


def _exited(outcome: Exited, number: int, workers: Workers, phase: str) -> WorkerError:
    label, report = workers.labels[number], workers.report([number], with_stacks=False)[number]
    text = f"{_named(label, workers)} {outcome.how} in {phase}{_and_all_killed(workers.labels)}"
    if phase == START and label.wrapper and not report.tail:
        text += (
            f". It wrote nothing; {label.wrapper} ran it: read the output of {label.wrapper}, or remove "
            f"{label.wrapper} from PATH"
        )
    elif phase == START and not report.tail and label.hosting.imports_main:
        text += (
            ". It wrote nothing: a script that starts workers must do so under `if __name__ == '__main__':`, "
            f"because every {label.hosting.role} imports the script"
        )
    return LostWorkerError(text + _last_lines(label, report.tail))


def _raised(outcome: Raised, number: int, late: Sequence[int], workers: Workers, phase: str) -> LucidError:
    label = workers.labels[number]
    # The worker may have failed because it waited for a late worker.
    others = workers.report(late, with_stacks=True)
    error: LucidError
    if outcome.lucid_error is not None:
        error = outcome.lucid_error
        where = f"; its output is in {label.log_path}" if label.log_path is not None else ""
        error.add_note(f"raised by {_named(label, workers)} in {phase}{where}")
    else:
        text = f"{_named(label, workers)} failed in {phase}: {outcome.summary}{_and_all_killed(workers.labels)}"
        own = workers.report([number], with_stacks=False)[number]
        error = WorkerError(text + _last_lines(label, own.tail) + _stacks(others, workers))
    error.__cause__ = RemoteTraceback(outcome.trace)
    return error


def _timed_out(late: Sequence[int], workers: Workers, phase: str, timeout_s: float) -> WorkerError:
    labels = workers.labels
    hosting = labels[0].hosting
    setting = hosting.start_setting if phase == START else hosting.phase_settings.get(phase, hosting.call_setting)
    text = (
        f"{_listed([labels[rank] for rank in late])} of {_total(labels)}{_on_nodes(late, workers)} did not finish "
        f"{phase} within {timeout_s:g} s{_and_all_killed(labels)}. If it needs longer, raise {setting}"
    )
    reports = workers.report(late, with_stacks=True)
    last_lines = [_last_lines(labels[number], report.tail) for number, report in reports.items()]
    error = LostWorkerError(text + _stacks(reports, workers) + "".join(last_lines))
    error.timed_out = True
    return error


def _named(label: WorkerLabel, workers: Workers) -> str:
    return f"{label.name} of {_total(workers.labels)}{_on_nodes([label.rank], workers)}"


def _on_nodes(numbers: Sequence[int], workers: Workers) -> str:
    """The nodes of workers that are not on this machine."""
    nodes = list(dict.fromkeys(node for number in numbers if (node := workers.labels[number].node) is not None))
    return f" on node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)}" if nodes else ""


def _listed(labels: Sequence[WorkerLabel]) -> str:
    role = labels[0].hosting.role
    return f"{role}{'s' if len(labels) > 1 else ''} " + ", ".join(str(label.number) for label in labels)


def _total(labels: Sequence[WorkerLabel]) -> int:
    return labels[0].hosting.total(len(labels))


def _and_all_killed(labels: Sequence[WorkerLabel]) -> str:
    """What happened to the rest of the group; the other workers of a pool go on."""
    return f"; all {labels[0].hosting.role}s were killed" if labels[0].hosting.pool_size is None else ""


def _last_lines(label: WorkerLabel, tail: str) -> str:
    if not tail:
        return ""
    indented = "\n".join(f"  {line}" for line in tail.splitlines())
    return f"\nLast lines of {label.name} ({label.log_path}):\n{indented}"


def _stacks(reports: Mapping[int, WorkerReport], workers: Workers) -> str:
    """The stacks of busy workers."""
    text = ""
    for number, report in reports.items():
        if report.stack:
            name = workers.labels[number].name.capitalize()
            text += f"\n{name}{_on_nodes([number], workers)} was at, innermost first:\n{report.stack}"
    return text


def _can_be_pickled(error: LucidError) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # for instance a constructor that takes more than the message
        return False
    return True
