"""The codes for what can be wrong with any file, whatever it is about: `T` in topology files, `C` in training files."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FileCodes:
    """Which code each general mistake has in one family of files."""

    missing_file: str
    empty_file: str
    not_text: str
    syntax: str
    unknown_key: str
    wrong_value: str
    missing_key: str
    repeated_key: str
    byte_order_mark: str
    line_ends: str


TOPOLOGY = FileCodes(
    missing_file="T001",
    empty_file="T002",
    not_text="T003",
    unknown_key="T004",
    wrong_value="T005",
    missing_key="T006",
    repeated_key="T007",
    syntax="T008",
    byte_order_mark="T009",
    line_ends="T010",
)

CONFIGURATION = FileCodes(
    missing_file="C001",
    empty_file="C002",
    not_text="C003",
    unknown_key="C004",
    wrong_value="C005",
    missing_key="C006",
    repeated_key="C007",
    syntax="C008",
    byte_order_mark="C009",
    line_ends="C010",
)
