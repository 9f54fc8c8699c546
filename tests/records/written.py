"""Records as tests spell them, read as the launcher reads them."""

from ttlaunch import contract
from ttlaunch.records.ranks import read_progress


def progress(content):
    """What the launcher makes of a line with this content in a rank's progress."""
    return read_progress(contract.record_line(content).encode())
