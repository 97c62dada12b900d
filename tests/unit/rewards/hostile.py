"""A verifier that does what completions say; processes import it by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from lucidrl.errors import ConfigError, DataError
from lucidrl.rewards.interfaces import Completion, ParseFailure


class Obedient:
    """Scores a completion that says nothing special with its length plus the row's `bonus`."""

    def __init__(self, problem: str = ""):
        self.kept = bytearray()
        if problem == "refuse":
            raise ConfigError("reward.kwargs.problem=refuse is not valid; remove it")
        if problem == "exit":
            os._exit(5)

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        text = completion.text
        if "unusable" in row:
            raise DataError("column 'unusable' is there; remove it")
        word, _, rest = text.partition(" ")
        match word:
            case "sleep":
                time.sleep(float(rest))
            case "loop":
                while True:
                    pass
            case "native":
                return float(len(str(10**10**10)))
            case "exit":
                os._exit(int(rest or 0))
            case "sys.exit":
                sys.exit(3)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise ValueError(rest)
            case "parse":
                raise ParseFailure("there is no number")
            case "memory":
                return float(len(b"1" * (4 << 30)))
            case "keep":
                self.kept += b"1" * (int(rest) << 20)
            case "kept":
                return float(len(self.kept))
            case "nan":
                return float("nan")
            case "text":
                return "1.0"  # type: ignore[return-value]
            case "fork":  # a child that returns from the call, too
                os.fork()
            case "grandchild":  # leaves a process in another session behind
                subprocess.Popen(["sleep", "987.5"], start_new_session=True)
                if rest:
                    time.sleep(float(rest))
            case "daemon":
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        time.sleep(987.5)
                    os._exit(0)
                os.wait()
            case "print":
                os.write(1, b"x" * 10_000_000)
                os.write(2, b"x" * 10_000_000)
            case "limits":
                import resource

                return float(resource.getrlimit(resource.RLIMIT_CPU)[0])
            case "pid":
                return float(os.getpid())
        return float(len(text)) + row.get("bonus", 0)
