"""Envs in processes of their own that step independently of each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lucidrl.envs.creator import EnvCreator
from lucidrl.envs.parallel import ParallelEnv
from lucidrl.envs.process_main import RESET, STEP_AND_RESET
from lucidrl.envs.processes import EnvProcess, wait_any
from lucidrl.errors import ConfigError, EnvironmentFailure


class FreeEnvs:
    """The envs that `creators` make. Each is a row of `env.rows`: it takes its action there, and leaves there what came
    of it and the root of its next step, begun anew if it was done.

    Args:
        step_timeout_s: deadline of every step and reset.
        start_timeout_s: deadline of the start.

    Raises:
        EnvironmentFailure: here and in all calls, if an env raises or its process dies or misses the deadline. All
            processes have ended then.
    """

    def __init__(self, creators: Sequence[EnvCreator], *, step_timeout_s: float, start_timeout_s: float):
        self._stepping: dict[EnvProcess, int] = {}
        self.env = ParallelEnv(
            len(creators),
            creators,
            num_processes=len(creators),
            step_timeout_s=step_timeout_s,
            start_timeout_s=start_timeout_s,
        )
        if len(self.env.batch_size) > 1:
            self.close()
            raise ConfigError(
                f"envs that step independently are single ones, but these have batch size "
                f"{list(self.env.batch_size[1:])}; make one factory for each env"
            )

    def reset(self) -> None:
        """Begin new episodes in all envs; what steps were about to tell is dropped."""
        self.settle()
        self.env.rows.mask.fill(True)
        self.env.run(RESET)

    def set_seed(self, seed: int) -> int:
        """Seed all envs differently, from the next reset on; returns the first seed that is not used by it."""
        self.settle()
        return self.env.set_seed(seed)

    def start(self, picked: np.ndarray) -> None:
        """Let the envs with these numbers take a step; returns at once."""
        for index in picked.tolist():
            process = self.env.processes[index]
            self._stepping[process] = index
            process.start(STEP_AND_RESET)

    def wait(self) -> np.ndarray:
        """The numbers of those that have taken their step, as soon as there is one; ascending."""
        try:
            done = wait_any(list(self._stepping))
            for process in done:
                process.finish()
            return np.array(sorted(self._stepping.pop(process) for process in done))
        except BaseException as error:  # Ctrl-C too: the processes are in the middle of something
            if self.env.is_closed:  # by another thread
                raise EnvironmentFailure("the envs were closed in the middle of a step; make others") from None
            self._stepping.clear()
            is_theirs = isinstance(error, EnvironmentFailure)
            self.env.kill(str(error) if is_theirs else "the driver was interrupted while they were busy")
            raise

    def settle(self) -> None:
        """Wait until no env is in the middle of a step."""
        while self._stepping:
            self.wait()

    def close(self) -> None:
        """End the processes, whatever they are busy with; may be called twice."""
        self._stepping.clear()
        self.env.close()
