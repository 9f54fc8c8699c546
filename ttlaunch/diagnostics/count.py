"""Numbers with their nouns as they stand in sentences: `1 rank`, `4 ranks`."""


def counted(count: int, noun: str) -> str:
    """The number and the noun, in the plural unless there is one; a role's underscores become spaces."""
    return f"{count} {noun.replace('_', ' ')}{'' if count == 1 else 's'}"
