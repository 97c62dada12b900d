"""The exceptions that Lucid RL raises on purpose.

Every message names the value, the rule it breaks and the remedy.
"""


class LucidError(Exception):
    """Base of all errors raised on purpose; the command line prints the message without a traceback."""


class ConfigError(LucidError, ValueError):
    """A setting, or a combination of settings, is invalid."""


class DataError(LucidError, ValueError):
    """A dataset, prompt or batch is unusable."""


class EnvironmentFailure(LucidError, RuntimeError):  # noqa: N818 - something observed, not a mistake
    """An environment raised, timed out or returned an invalid reward."""


class CheckpointError(LucidError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or from another model."""


class TrainingError(LucidError, RuntimeError):
    """Training cannot continue, for instance after too many steps with non-finite gradients."""


class WorkerError(LucidError, RuntimeError):
    """A worker raised, exited or timed out, or its group is shut down; the message says which worker and where."""


class LostWorkerError(WorkerError):
    """A worker's process exited or was killed without raising, so another worker may repeat its work."""

    node: str | None = None
    """The node that failed with all its workers, if that is the cause."""
    timed_out: bool = False
    """Whether the driver killed the worker because it timed out."""


class RefitError(LucidError, RuntimeError):
    """A refit failed; the generator keeps its previous policy version."""
