"""Numbers, sizes and durations as short text for tables."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def shown_bytes(number: float) -> str:
    """A size such as `1.5 MiB`; `-` for 0."""
    if number == 0:
        return "-"
    unit = 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.0f} {_UNITS[unit]}" if unit == 0 or number >= 100 else f"{number:.1f} {_UNITS[unit]}"


def shown_seconds(seconds: float | None) -> str:
    """A duration such as `14 s`, `3m 05s`, `2h 10m` or `4d 01h`; `-` for None."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24:02d}h"
    if hours:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{whole} s"


def shown_number(value: float | None, *, with_sign: bool = False) -> str:
    """A number with about four digits; `-` for None."""
    if value is None:
        return "-"
    form = ",.0f" if 1000 <= abs(value) < 1e9 else ".4g"
    return format(value, ("+" if with_sign else "") + form)
