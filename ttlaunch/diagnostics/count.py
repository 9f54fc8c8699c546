"""Numbers as they stand in sentences: counts with their nouns, such as `4 ranks`, and sizes, such as `3.4 MB`."""


def counted(count: int, noun: str) -> str:
    """Return number and noun, in the plural unless there is one; a role's underscores become spaces."""
    return f"{count} {noun.replace('_', ' ')}{'' if count == 1 else 's'}"


def render_size(size: int) -> str:
    """Write a number of bytes in its largest decimal unit, exact below a kilobyte: `1 byte`, `512 bytes`, `3.4 MB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return counted(size, "byte")
