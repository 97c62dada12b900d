"""From what the ranks answered, or did not, to the error that says what went wrong where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lucidrl.distributed.child_main import Raised, RemoteTraceback
from lucidrl.distributed.launchers.rank_log import wait_for_growth
from lucidrl.distributed.launchers.rank_process import Died, Outcome, RankProcess
from lucidrl.errors import LucidError, WorkerError

START = "the start"
"""The phase before the first call."""


def explain_failure(
    phase: str, timeout_s: float, outcomes: Mapping[int, Outcome], ranks: Sequence[RankProcess]
) -> LucidError:
    """The error to raise, for ranks of which at least one did not return.

    A dead rank is the cause even if another one noticed first, in a collective; then errors of ours, which are raised
    on purpose; then whatever was raised first. If nothing was, the deadline has passed.
    """
    for number, outcome in outcomes.items():
        if isinstance(outcome, Died):
            return _died(ranks[number], len(ranks), phase)
    raised = [(number, outcome) for number, outcome in outcomes.items() if isinstance(outcome, Raised)]
    raised.sort(key=lambda pair: pair[1].lucid_error is None)
    if raised:
        number, outcome = raised[0]
        return _raised(outcome, ranks[number], _unfinished(outcomes, ranks), len(ranks), phase)
    return _late(_unfinished(outcomes, ranks), len(ranks), phase, timeout_s)


def _died(rank: RankProcess, size: int, phase: str) -> WorkerError:
    text = f"{rank.name} of {size} {rank.how_it_ended()} in {phase}; all {rank.role}s were ended"
    if phase == START and rank.is_wrapped and not rank.log.tail():
        text += f". It wrote nothing, and it was run by {rank.wrapper}: see what that wrote, or take it off PATH"
    elif phase == START and not rank.log.tail():
        text += (
            ". It wrote nothing: if a script starts the workers, it must do so under `if __name__ == '__main__':`, "
            "because every rank imports it"
        )
    return WorkerError(text + _last_lines(rank))


def _raised(outcome: Raised, rank: RankProcess, others: Sequence[RankProcess], size: int, phase: str) -> LucidError:
    error: LucidError
    if outcome.lucid_error is not None:
        error = outcome.lucid_error
        error.add_note(f"raised by {rank.name} of {size} in {phase}; its output is in {rank.log.path}")
    else:
        text = f"{rank.name} of {size} failed in {phase}: {outcome.summary}; all {rank.role}s were ended"
        # If the rank gave up waiting for another one, that one is what to look at.
        error = WorkerError(text + _last_lines(rank) + _whereabouts(others))
    error.__cause__ = RemoteTraceback(outcome.trace)
    return error


def _late(late: Sequence[RankProcess], size: int, phase: str, timeout_s: float) -> WorkerError:
    role = late[0].role
    names = f"{role}{'s' if len(late) > 1 else ''} " + ", ".join(str(rank.rank) for rank in late)
    setting = "start_timeout_s" if phase == START else "call_timeout_s"
    text = (
        f"{names} of {size} did not finish {phase} within {timeout_s:g} s; all {role}s were ended. If it needs longer, "
        f"raise cluster.{setting}"
    )
    last_lines = "".join(map(_last_lines, late))  # before the ranks write where they are
    return WorkerError(text + _whereabouts(late) + last_lines)


def _unfinished(outcomes: Mapping[int, Outcome], ranks: Sequence[RankProcess]) -> list[RankProcess]:
    return [rank for rank in ranks if rank.rank not in outcomes]


def _last_lines(rank: RankProcess) -> str:
    tail = rank.log.tail()
    return f"\nLast lines of {rank.name} ({rank.log.path}):\n{_indented(tail)}" if tail else ""


def _whereabouts(ranks: Sequence[RankProcess]) -> str:
    """Where ranks that are still busy are."""
    sizes = [(rank.log, rank.ask_for_stack()) for rank in ranks]
    wait_for_growth(sizes)
    text = ""
    for rank, (log, size_bytes) in zip(ranks, sizes, strict=True):
        if stack := log.stack_from(size_bytes):
            text += f"\n{rank.name.capitalize()} was at, innermost first:\n{stack}"
    return text


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
