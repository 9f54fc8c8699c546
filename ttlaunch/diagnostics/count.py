"""Numbers as they stand in sentences: counts with their nouns (`4 ranks`), sizes (`3.4 MB`) and times (`27 min 46 s`)."""

from itertools import pairwise


def counted(count: int, noun: str) -> str:
    """Return number and noun, in the plural unless there is one; a role's underscores become spaces."""
    return f"{count} {noun.replace('_', ' ')}{'' if count == 1 else 's'}"


def render_size(size: int) -> str:
    """Write a number of bytes in its largest decimal unit, exact below a kilobyte: `1 byte`, `512 bytes`, `3.4 MB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return counted(size, "byte")


def render_duration(seconds: float) -> str:
    """Write a time in its two largest units, rounded to seconds: `12 s`, `27 min 46 s`, `3 h 5 min`, `2 d 4 h`."""
    whole = round(seconds)
    for (unit, size), (small, part) in pairwise((("d", 86400), ("h", 3600), ("min", 60), ("s", 1))):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"
