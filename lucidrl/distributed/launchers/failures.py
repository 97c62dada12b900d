"""From what the ranks answered, or did not, to the error that says what went wrong where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lucidrl.distributed.child_main import Raised, RemoteTraceback
from lucidrl.distributed.launchers.interfaces import NodeLost, RankLabel, RankReport, Ranks
from lucidrl.distributed.launchers.rank_process import Died, Outcome
from lucidrl.errors import LostWorkerError, LucidError, WorkerError

START = "the start"
"""The phase before the first call."""
IDLE = "the wait for its next call"
"""The phase between two of them."""


def explain_failure(phase: str, timeout_s: float, outcomes: Mapping[int, Outcome], ranks: Ranks) -> LucidError:
    """The error to raise, for ranks of which at least one did not return.

    A dead rank is the cause even if another one noticed first, in a collective; then errors of ours, which are raised
    on purpose; then whatever was raised first. If nothing was, the deadline has passed.

    Raises:
        NodeLost: if that turns out to be the cause.
    """
    for number, outcome in outcomes.items():
        if isinstance(outcome, Died):
            return _died(outcome, number, ranks, phase)
    late = [label.rank for label in ranks.labels if label.rank not in outcomes]
    raised = [(number, outcome) for number, outcome in outcomes.items() if isinstance(outcome, Raised)]
    raised.sort(key=lambda pair: pair[1].lucid_error is None)
    if raised:
        number, outcome = raised[0]
        return _raised(outcome, number, late, ranks, phase)
    return _late(late, ranks, phase, timeout_s)


def explain_loss(lost: NodeLost, phase: str, labels: Sequence[RankLabel]) -> WorkerError:
    """The error to raise for a node that is gone with all its ranks: one, however many they were."""
    of_node = [labels[rank] for rank in lost.ranks]
    last_lines = [_last_lines(label, RankReport(tail)) for label, tail in zip(of_node, lost.tails, strict=False)]
    error = LostWorkerError(
        f"node {lost.node} with {_listed(of_node)} of {_total(labels)} was lost in {phase}: {lost}"
        f"{_and_all_ended(labels)}{''.join(last_lines)}"
    )
    error.__cause__, error.node = lost.__cause__, lost.node
    return error


def _died(outcome: Died, number: int, ranks: Ranks, phase: str) -> WorkerError:
    label, report = ranks.labels[number], ranks.report([number], with_stacks=False)[number]
    text = f"{_named(label, ranks)} {outcome.how} in {phase}{_and_all_ended(ranks.labels)}"
    if phase == START and label.wrapper and not report.tail:
        text += f". It wrote nothing, and it was run by {label.wrapper}: see what that wrote, or take it off PATH"
    elif phase == START and not report.tail:
        text += (
            ". It wrote nothing: if a script starts the workers, it must do so under `if __name__ == '__main__':`, "
            "because every rank imports it"
        )
    return LostWorkerError(text + _last_lines(label, report))


def _raised(outcome: Raised, number: int, late: Sequence[int], ranks: Ranks, phase: str) -> LucidError:
    label = ranks.labels[number]
    # If the rank gave up waiting for another one, that one is what to look at; and it may be gone with its node.
    others = ranks.report(late, with_stacks=True)
    error: LucidError
    if outcome.lucid_error is not None:
        error = outcome.lucid_error
        error.add_note(f"raised by {_named(label, ranks)} in {phase}; its output is in {label.log_path}")
    else:
        text = f"{_named(label, ranks)} failed in {phase}: {outcome.summary}{_and_all_ended(ranks.labels)}"
        own = ranks.report([number], with_stacks=False)[number]
        error = WorkerError(text + _last_lines(label, own) + _whereabouts(others, ranks))
    error.__cause__ = RemoteTraceback(outcome.trace)
    return error


def _late(late: Sequence[int], ranks: Ranks, phase: str, timeout_s: float) -> WorkerError:
    labels = ranks.labels
    setting = "start_timeout_s" if phase == START else "call_timeout_s"
    text = (
        f"{_listed([labels[rank] for rank in late])} of {_total(labels)}{_on_nodes(late, ranks)} did not finish "
        f"{phase} within {timeout_s:g} s{_and_all_ended(labels)}. If it needs longer, raise cluster.{setting}"
    )
    reports = ranks.report(late, with_stacks=True)
    last_lines = [_last_lines(labels[number], report) for number, report in reports.items()]
    return LostWorkerError(text + _whereabouts(reports, ranks) + "".join(last_lines))


def _named(label: RankLabel, ranks: Ranks) -> str:
    return f"{label.name} of {_total(ranks.labels)}{_on_nodes([label.rank], ranks)}"


def _on_nodes(numbers: Sequence[int], ranks: Ranks) -> str:
    """Where ranks are, if that is not simply this machine."""
    nodes = list(dict.fromkeys(node for number in numbers if (node := ranks.labels[number].node) is not None))
    return f" on node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)}" if nodes else ""


def _listed(labels: Sequence[RankLabel]) -> str:
    return f"{labels[0].role}{'s' if len(labels) > 1 else ''} " + ", ".join(str(label.number) for label in labels)


def _total(labels: Sequence[RankLabel]) -> int:
    return labels[0].part.total or len(labels)


def _and_all_ended(labels: Sequence[RankLabel]) -> str:
    """What becomes of a group, unless there are others like it that go on."""
    return f"; all {labels[0].role}s were ended" if len(labels) == _total(labels) else ""


def _last_lines(label: RankLabel, report: RankReport) -> str:
    return f"\nLast lines of {label.name} ({label.log_path}):\n{_indented(report.tail)}" if report.tail else ""


def _whereabouts(reports: Mapping[int, RankReport], ranks: Ranks) -> str:
    """Where ranks that are still busy are."""
    text = ""
    for number, report in reports.items():
        if report.stack:
            name = ranks.labels[number].name.capitalize()
            text += f"\n{name}{_on_nodes([number], ranks)} was at, innermost first:\n{report.stack}"
    return text


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
