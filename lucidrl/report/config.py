"""Settings of the report."""

from __future__ import annotations

from lucidrl.utils.config import Config


class ReportConfig(Config):
    """The page that shows a run."""

    enabled: bool = True
    """Write `report.html` into the run folder at the end of the run."""
