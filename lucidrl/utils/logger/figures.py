"""Figures as pictures."""

from __future__ import annotations

import io
import threading
from typing import Any

# Drawing changes the figure, and several back ends may record the same one from threads of their own.
_drawing = threading.Lock()


class DrawnFigure:
    """A figure whose picture is drawn once, however many back ends ask for it; for the rest it is the figure itself."""

    def __init__(self, figure: Any) -> None:
        self._figure = figure
        self._png = png_of(figure)

    def savefig(self, file: Any, **options: Any) -> None:
        if options == {"format": "png"}:
            file.write(self._png)
        else:
            self._figure.savefig(file, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._figure, name)


def png_of(figure: Any) -> bytes:
    """The PNG file of a matplotlib figure, or of any object with its `savefig`; safe to call from several threads."""
    buffer = io.BytesIO()
    with _drawing:
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
