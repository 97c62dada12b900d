"""The time of `import lucidrl` and of `lucidrl --help`, each in a new process."""

from __future__ import annotations

import subprocess
import sys

from harness import Claim, arguments, report, take_turns

COMMANDS = {
    "nothing": [sys.executable, "-c", "pass"],
    "import": [sys.executable, "-c", "import lucidrl"],
    "help": [sys.executable, "-c", "from lucidrl.cli import main; main()", "--help"],
}


def main() -> None:
    options = arguments(__doc__)
    times = take_turns(
        {
            name: lambda command=command: subprocess.run(command, check=True, capture_output=True)
            for name, command in COMMANDS.items()
        }
    )
    print(f"bare Python interpreter: {times.median('nothing'):.3f} s (included below)")
    report(
        [
            Claim("import lucidrl", 0.3, times.median("import"), at_most=True, unit="s"),
            Claim("lucidrl --help", 1.0, times.median("help"), at_most=True, unit="s"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
