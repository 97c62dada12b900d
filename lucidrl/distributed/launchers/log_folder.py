"""Where the ranks of a group write their logs."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path


class LogFolder:
    """A folder with `rank_N.log` for each rank N.

    Args:
        given: the folder, made if need be; by default a temporary one, which is kept only if something goes wrong.
    """

    def __init__(self, given: Path | None):
        self._is_temporary = given is None
        self.path = given or Path(tempfile.mkdtemp(prefix="lucidrl-workers-"))
        self.path.mkdir(parents=True, exist_ok=True)

    def of_rank(self, rank: int) -> Path:
        return self.path / f"rank_{rank}.log"

    def marked(self) -> AbstractContextManager[str]:
        """As `marked`, for those who may write logs."""
        return marked(self.path)

    def end(self, everything_went_well: bool) -> None:
        """Remove a temporary folder that nobody will look into; may be called twice."""
        if not self._is_temporary:
            return
        if everything_went_well:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with suppress(OSError):  # kept if there is anything to read
                self.path.rmdir()


@contextmanager
def marked(folder: Path) -> Iterator[str]:
    """A file is there meanwhile, of this name: whoever sees it writes to the same folder."""
    file = folder / f".seen-{secrets.token_hex(8)}"
    file.touch()
    try:
        yield file.name
    finally:
        file.unlink(missing_ok=True)
