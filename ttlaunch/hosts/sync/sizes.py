"""Sizes of files as people read them."""

_STEP = 1000.0
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def render_size(count: int) -> str:
    """`1 byte`, `512 bytes`, `3.4 MB`."""
    if count == 1:
        return "1 byte"
    value, unit = float(count), 0
    while value >= _STEP and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{count} bytes" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
