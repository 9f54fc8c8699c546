"""Read `--mpi-args`: the arguments for mpirun that users of the vendor's launcher already have.

Arguments that name hosts become the hosts of the plan. Arguments that decide what the plan decides (how many ranks,
which slot each one takes, in which folder) are refused, because the run would then not be the one that was checked. Arguments
that change how mpirun shows output are left out with a warning, because ttlaunch marks and keeps the lines of each rank
anyway. All others go to mpirun as they are.
"""

import shlex
from collections.abc import Sequence
from dataclasses import field
from functools import partial

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Severity, Source, Span, shown
from ttlaunch.engines.base import EngineArguments
from ttlaunch.planning.secrets import mask_arguments
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern

_OPTION = "--mpi-args"
_HOSTS = {"host", "H"}
_HOSTFILE = {"hostfile", "machinefile", "default-hostfile"}
_SETTINGS = ("mca", "gmca", "omca", "prtemca", "pmixmca")
_RANKFILE_SETTING = "rmaps_rankfile_path"
_WHY_DECIDED = {
    "n": "`--ranks` or the bindings say how many ranks there are",
    "wdir": "ranks start in the current folder",
    "map-by": "rank r takes the r-th slot in the order of the hosts",
}
_DECIDED_BY_PLAN = {
    **dict.fromkeys(("n", "np", "c"), "n"),
    **dict.fromkeys(("wdir", "wd", "set-cwd-to-session-dir"), "wdir"),
    **dict.fromkeys(("map-by", "rank-by", "rankfile", "rf", "N", "npernode", "pernode", "ppr", "npersocket"), "map-by"),
    **dict.fromkeys(("bynode", "byslot", _RANKFILE_SETTING), "map-by"),
}
_OUTPUT = {"tag-output", "timestamp-output", "merge-stderr-to-stdout", "output-filename", "output"}
_TAKES_NO_VALUE = {*_OUTPUT - {"output-filename", "output"}, "pernode", "bynode", "byslot", "set-cwd-to-session-dir"}
_MAP_BY_RANKFILE = quick_pattern(r"rankfile:(?:[^:]*:)*?file=(?P<file>[^:]+)(?::.*)?")
_HOST = quick_pattern(r"(?P<name>.+?)(?::(?P<slots>[0-9]+))?\Z")


_mistake = partial(Diagnostic, "P015", blame=Blame.COMMAND_LINE)


def parse_mpi_args(text: str) -> tuple[EngineArguments, list[Diagnostic]]:
    """Split the text as a shell does, and sort its arguments."""
    source = Source(_OPTION, text)
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        message = f"`{_OPTION}` cannot be split into arguments: {str(error).lower()}"
        return EngineArguments(), [_mistake(message, Label(_whole(source)))]
    sorted_arguments = _SortedArguments(source, arguments)
    while sorted_arguments.rest:
        sorted_arguments.take()
    hosts, files, found = sorted_arguments.hosts, sorted_arguments.files, sorted_arguments.found
    if len(files) + bool(hosts) > 1:
        message = f"`{_OPTION}` names hosts in several ways; one was expected"
        found.append(_mistake(message, Label(_whole(source))))
    passed, rankfile = tuple(sorted_arguments.passed), sorted_arguments.rankfile
    return EngineArguments(_as_hostfile(hosts), files[0] if files else None, passed, rankfile), found


@dataclass
class _SortedArguments:
    """The arguments of `--mpi-args` while they are sorted.

    Attributes:
        rest: The arguments that are not sorted yet.
        files: The hostfiles that were named.
        passed: The arguments for mpirun.
        found: The mistakes in arguments.
        rankfile: The last rankfile that was named, and the mistake that this is.
        place: Where the search for the next argument begins in the text.
    """

    source: Source
    rest: list[str]
    hosts: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    found: list[Diagnostic] = field(default_factory=list)
    rankfile: tuple[str, Diagnostic] | None = None
    place: int = 0

    def take(self) -> None:
        """Sort the next option with its value, or the value of an option that is passed on."""
        word = self.rest.pop(0)
        self.place = max(self.source.text.find(word, self.place), self.place)
        span = self.source.span(1, self.place + 1, max(1, len(word)))
        self.place += len(word)
        name, equals, value = word.lstrip("-").partition("=") if word.startswith("-") else ("", "", "")
        if name in _SETTINGS and self.rest[:1] == [_RANKFILE_SETTING]:
            name = self.rest.pop(0)
        if name in _HOSTS | _HOSTFILE:
            if not equals and (not self.rest or self.rest[0].startswith("-")):
                self.found.append(_mistake(f"`{shown(word)}` names no host", Label(span, "expected a value")))
            else:
                (self.hosts if name in _HOSTS else self.files).append(value if equals else self.rest.pop(0))
        elif name in _DECIDED_BY_PLAN:
            why = _WHY_DECIDED[_DECIDED_BY_PLAN[name]]
            message = f"`{shown(word)}` in `{_OPTION}` sets what the plan decides"
            self.found.append(_mistake(message, Label(span, why), hints=(f"leave `{shown(word)}` out",)))
            if not equals and name not in _TAKES_NO_VALUE and self.rest:
                value = self.rest.pop(0)
            rankfile = _rankfile(name, value)
            self.rankfile = (rankfile, self.found[-1]) if rankfile else self.rankfile
        elif name in _OUTPUT:
            message = f"`{shown(word)}` in `{_OPTION}` is ignored: ttlaunch marks lines by rank and keeps them per rank"
            self.found.append(_mistake(message, Label(span), severity=Severity.WARNING))
            if not equals and name not in _TAKES_NO_VALUE:
                del self.rest[:1]
        elif word in {":", "--"} or (not self.passed and not name):
            message = f"`{shown(word)}` in `{_OPTION}` is not an option of mpirun"
            hint = "the program goes after `--`, at the end of the line"
            self.found.append(_mistake(message, Label(span), hints=(hint,)))
        elif mask_arguments([*self.passed[-1:], word])[-1] != word:
            shown_word = shown(mask_arguments([*self.passed[-1:], word])[-1])
            message = f"`{shown_word}` in `{_OPTION}` would show a secret to every user of this machine"
            hint = "export the variable, and give its name alone: `-x NAME`"
            self.found.append(_mistake(message, Label(span, "stands on mpirun's command line"), hints=(hint,)))
        else:
            self.passed.append(word)


def _rankfile(name: str, value: str) -> str:
    """Return the rankfile that an option names; empty if it names none."""
    if name in {"rankfile", "rf", _RANKFILE_SETTING}:
        return value
    match = _MAP_BY_RANKFILE.fullmatch(value) if name == "map-by" else None
    return match["file"] if match else ""


def own_settings(settings: Sequence[Sequence[str]], passed: Sequence[str]) -> list[str]:
    """Return ttlaunch's settings for mpirun without those that the user sets: mpirun refuses a setting that is given twice."""
    theirs = {word.lstrip("-").partition("=")[0] for word in passed if word.startswith("-")}
    bare = [word.lstrip("-") for word in passed]
    theirs |= {f"mca {bare[index + 1]}" for index, word in enumerate(bare[:-1]) if word in _SETTINGS}
    kept: list[str] = []
    for setting in settings:
        name = setting[0].lstrip("-")
        if (f"mca {setting[1]}" if name == "mca" else name) not in theirs:
            kept += setting
    return kept


def unknown_option(text: str, option: str) -> Diagnostic:
    """Report an option in the text that this machine's mpirun refuses."""
    source = Source(_OPTION, text)
    place = source.span(1, max(0, text.find(option)) + 1, len(option))
    return _mistake(f"`{shown(option)}` in `{_OPTION}` is not an option of this machine's mpirun", Label(place))


def _whole(source: Source) -> Span:
    return source.span(1, 1, max(1, len(source.text)))


def _as_hostfile(lists: list[str]) -> Source | None:
    """Turn `a,b:2` into lines of a hostfile; a host that is named twice gets the sum of its slots."""
    slots: dict[str, int] = {}
    for name, count in (_host(word) for words in lists for word in words.split(",")):
        slots[name] = slots.get(name, 0) + count
    lines = [f"{name} slots={count}" for name, count in slots.items()]
    return Source(f"{_OPTION} --host", "\n".join(lines)) if lists else None


def _host(word: str) -> tuple[str, int]:
    match = _HOST.match(word.strip())
    if match is None or (match["name"].count(":") and not match["name"].startswith("[")):
        return word.strip(), 1
    return match["name"].strip("[]"), int(match["slots"] or 1)
