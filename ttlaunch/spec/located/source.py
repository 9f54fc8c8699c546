"""Read a file that a user wrote as UTF-8 text, and report if it is missing, not text or in an unusual encoding."""

from pathlib import Path

from ttlaunch.diagnostics.diagnostic import Blame, Diagnostic, Label, Severity
from ttlaunch.diagnostics.span import Source
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import FileCodes
from ttlaunch.system_reason import system_reason

LARGEST_FILE_MIB = 16
"""The largest description that is read: far more than a cluster of thousands of hosts needs."""
_LARGEST_FILE = LARGEST_FILE_MIB * 1024 * 1024
_LONGEST_NAME = 300
_STREAMS = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")  # the paths that a shell gives to `<(command)`
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def read_source(
    path: Path, *, codes: FileCodes, what: str, name: str | None = None, blame: Blame = Blame.DESCRIPTION
) -> tuple[Source | None, list[Diagnostic]]:
    """Read a file.

    Args:
        path: The file.
        codes: The family of codes for its diagnostics.
        what: What the file is, with an article: "a hostfile".
        name: How messages call the file; the path itself if not given.
        blame: What is at fault if the file cannot be opened: the command line, if it names the file.

    Returns:
        The source, or None if there is nothing to parse; and the diagnostics.
    """
    name = shown(path if name is None else name, longest=_LONGEST_NAME)

    def unreadable(why: str) -> tuple[None, list[Diagnostic]]:
        return None, [Diagnostic(codes.missing_file, f"{name} {why}", blame=blame)]

    try:
        path.stat()
        if path.is_dir():
            return unreadable(f"is a folder; {what} was expected")
        if not ends_by_itself(path):
            return unreadable(f"is not a regular file; {what} was expected")
        with path.open("rb") as file:
            # Reading one byte too many shows that the limit is exceeded: a pipe has no size to check first.
            data = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        return unreadable(f"does not exist; {what} was expected")
    except (OSError, ValueError) as error:
        return unreadable(f"cannot be read: {system_reason(error)}")
    return source_from_bytes(data, codes=codes, what=what, name=name)


def ends_by_itself(path: Path) -> bool:
    """Return whether an existing path is a regular file, or the pipe of a shell's `<(command)`, so that reading it ends.

    Reading a device, or a named pipe that nobody writes to, could wait forever.
    """
    return path.is_file() or str(path).startswith(_STREAMS)


def source_from_bytes(data: bytes, *, codes: FileCodes, what: str, name: str) -> tuple[Source | None, list[Diagnostic]]:
    """Do the same as `read_source` for bytes that have already been read, such as standard input."""
    found: list[Diagnostic] = []
    name = shown(name, longest=_LONGEST_NAME)
    if len(data) > _LARGEST_FILE:
        return None, [
            Diagnostic(codes.not_text, f"{name} is larger than {LARGEST_FILE_MIB} MiB, which {what} never is")
        ]
    has_bom, data = data.startswith(_BOM), data.removeprefix(_BOM)
    hint = f"{what} is a text file; save it as UTF-8"
    if data.startswith(_UTF_16):
        return None, [Diagnostic(codes.not_text, f"{name} is UTF-16 text; UTF-8 was expected", hints=(hint,))]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} in line {line}"
        return None, [Diagnostic(codes.not_text, message, hints=(hint,))]
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        return None, [Diagnostic(codes.not_text, f"{name} is not text: line {line} holds a zero byte")]
    windows_lines = text.count("\r")
    source = Source(name, text.replace("\r\n", "\n").replace("\r", "\n"))
    if not source.text.strip():
        return None, [Diagnostic(codes.empty_file, f"{name} is empty; {what} was expected")]
    if has_bom:
        found.append(_note(codes.byte_order_mark, source, "begins with a byte-order mark, which was skipped"))
    if windows_lines:
        lines = "1 line" if windows_lines == 1 else f"{windows_lines} lines"
        found.append(_note(codes.line_ends, source, f"has Windows line ends in {lines}; they were read as plain ones"))
    return source, found


def _note(code: str, source: Source, text: str) -> Diagnostic:
    return Diagnostic(code, f"{source.name} {text}", Label(source.start()), severity=Severity.NOTE)
