"""The characters by which byte-level tokenizers write bytes, as GPT-2 defined them. Standard library only."""

_PRINTABLE = (range(ord("!"), ord("~") + 1), range(ord("¡"), ord("¬") + 1), range(ord("®"), ord("ÿ") + 1))
"""Bytes that GPT-2's alphabet of bytes writes as the character of the same number."""


def byte_characters() -> list[str]:
    """Return for each byte the character that stands for it in a byte-level vocabulary, as GPT-2 defined it.

    >>> byte_characters()[65], byte_characters()[32]
    ('A', 'Ġ')
    """
    shown = {byte for span in _PRINTABLE for byte in span}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]
