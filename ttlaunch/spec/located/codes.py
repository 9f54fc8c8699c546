"""The codes for what can be wrong with any file, whatever it is about: `T` in topology files, `C` in training files.

Both families count in the same order, from 001: the order of the fields below.
"""

from ttlaunch.quick_dataclass import dataclass


@dataclass(frozen=True)
class FileCodes:
    """The codes of the general mistakes, in one family of files."""

    missing_file: str
    empty_file: str
    not_text: str
    unknown_key: str
    wrong_value: str
    missing_key: str
    repeated_key: str
    syntax: str
    byte_order_mark: str
    line_ends: str


TOPOLOGY = FileCodes("T001", "T002", "T003", "T004", "T005", "T006", "T007", "T008", "T009", "T010")
CONFIGURATION = FileCodes("C001", "C002", "C003", "C004", "C005", "C006", "C007", "C008", "C009", "C010")
