"""The exceptions a user of Lucid RL can meet.

Every message names the value that was found, the rule it breaks and what to do about it.
"""


class LucidError(Exception):
    """Base of all errors raised on purpose; the command line prints its message without a traceback."""


class ConfigError(LucidError, ValueError):
    """A configuration value, key or combination is not acceptable."""


class DataError(LucidError, ValueError):
    """A dataset, prompt or batch cannot be used as it is."""


class EnvironmentFailure(LucidError, RuntimeError):  # noqa: N818 - something observed, not a mistake
    """An environment raised, exceeded its deadline or returned an unusable reward."""


class CheckpointError(LucidError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or of another model."""


class TrainingError(LucidError, RuntimeError):
    """Training cannot go on, for instance after too many steps with non-finite gradients."""


class WorkerError(LucidError, RuntimeError):
    """A worker raised, died or missed its deadline, or its group has ended; the message says which and where."""


class LostWorkerError(WorkerError):
    """A worker's process is gone or was ended at its deadline; nothing it raised, so another one may do its work."""

    node: str | None = None
    """The node that all workers were lost with, if that is how."""
    timed_out: bool = False
    """Whether the worker was killed because it did not finish in time."""


class RefitError(LucidError, RuntimeError):
    """Weights did not come from the policy to a generator; the generator still has the version it had."""
