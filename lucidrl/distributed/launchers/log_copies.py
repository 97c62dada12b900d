"""Logs of ranks whose machine does not see the run's folder: what is new travels with every answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_MOST_BYTES = 1 << 16
"""Of a rank, at a time; what is more comes the next time."""
_MOST_LAST_BYTES = 1 << 20
"""At the end, when there is no next time: the newest, of what is left."""


class NewOutput:
    """On the machine of the ranks: what they wrote since the last time.

    Args:
        paths: their logs.
    """

    def __init__(self, paths: Mapping[int, Path]):
        self._paths = paths
        self._sent = dict.fromkeys(paths, 0)

    def take(self, is_last: bool = False) -> dict[int, bytes]:
        """Of each rank that wrote anything; as much as is worth to be sent."""
        taken = {}
        for rank, path in self._paths.items():
            size_bytes = path.stat().st_size if path.exists() else 0
            begin, note = self._sent[rank], b""
            if is_last and size_bytes - begin > _MOST_LAST_BYTES:
                left_out = size_bytes - begin - _MOST_LAST_BYTES
                begin, note = begin + left_out, b"\n[%d bytes are left out here]\n" % left_out
            if begin == size_bytes:
                continue
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read(_MOST_LAST_BYTES if is_last else _MOST_BYTES)
            self._sent[rank] = begin + len(content)
            taken[rank] = note + content
        return taken


def append(path: Path, content: bytes) -> None:
    """On the machine of the driver."""
    with path.open("ab") as file:
        file.write(content)
