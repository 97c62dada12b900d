"""Base class of workers that record their process when the profile request selects them."""

from __future__ import annotations

from lucidrl.profiling.recording import Recording
from lucidrl.utils.nsys import is_recorded


class Recorded:
    """Base of workers that record their process; a subclass sets `_recording`. See `lucidrl.utils.nsys`."""

    _recording: Recording

    def start_gpu_profiling(self) -> None:
        """Start a `Recording` of this process, if it is selected for profiling."""
        if is_recorded(self._recording.name):
            self._recording.start()

    def stop_gpu_profiling(self) -> None:
        """Stop and write the recording, if any."""
        self._recording.stop()
