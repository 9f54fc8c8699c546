"""Read a hostfile: the hosts, and the number of ranks that may run on each.

The meaning is that of Open MPI; tests compare it with `mpirun --do-not-launch --display allocation`: a host that is
listed without `slots=` has one slot for each time it is listed, `max_slots` alone also gives the slots, and two
names that are equal up to their first dot are one host. ttlaunch is stricter on purpose: what mpirun silently
skips (a second word on a line) or misreads (`a:2` as a name) is an error here, and so are hosts without slots.
"""

import re
from collections import Counter
from dataclasses import field, replace
from itertools import groupby

from ttlaunch.diagnostics.diagnostic import Diagnostic, mistake_at
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import closest, shown
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.host_names import expand_ranges, host_name_problem, user_name_problem
from ttlaunch.spec.topology.model import Host, HostName

_RANKFILE = quick_pattern(r"\s*rank\s+(?P<rank>[0-9]{1,9})\s*=\s*(?P<host>\S+)(\s+slots?\s*=.*)?", re.IGNORECASE)
_WORD = quick_pattern(r"[^\s=]+(\s*=\s*[^\s=]*)?|=\S*")
_COMMENT = quick_pattern(r"#|(?<!\S)//")
_COUNT = quick_pattern(r"[0-9]+\Z")
_ADDRESS = quick_pattern(r"[0-9.]+\Z")
_SLOTS = ("slots", "max_slots", "max-slots")
_MOST_SLOTS = 65_536
_MOST_SLOTS_IN_ALL = 1_000_000
MOST_HOSTS_IN_ALL = 262_144
_LONGEST_SHOWN = 253
_MOST_LINES_SHOWN = 32


@dataclass(frozen=True)
class HostLine:
    """One host of one line, as written.

    Attributes:
        counts: For `slots` and `max_slots`, the number that the line gives, and its place.
    """

    name: str
    user: str | None
    span: Span
    counts: dict[str, tuple[int, Span]] = field(default_factory=dict)


def parse_hosts(source: Source) -> tuple[list[Host], list[Diagnostic]]:
    """Read the text of a hostfile.

    Returns:
        The hosts in the order in which ranks fill them, and the diagnostics. If one of these is an error, the hosts
        are those that could be read.
    """
    rankfile = _rankfile(source)
    if rankfile:
        return [], [rankfile]
    lines: list[HostLine] = []
    found: list[Diagnostic] = []
    for number, text in enumerate(source.lines, start=1):
        comment = _COMMENT.search(text)
        words = list(_WORD.finditer(text[: comment.start()] if comment else text))
        if words:
            spans = [Span(source, number, word.start() + 1, len(word.group().rstrip())) for word in words]
            read, mistakes = _parse_line([word.group() for word in words], spans)
            lines += read
            found += mistakes
            if len(lines) > MOST_HOSTS_IN_ALL:
                message = f"{source.name} lists more than {MOST_HOSTS_IN_ALL} hosts"
                return [], [*found, mistake_at(codes.SLOTS, message, spans[0], label="up to here")]
    if not lines and not found:
        message = f"{source.name} lists no host; mpirun would run everything on this machine"
        found.append(Diagnostic(TOPOLOGY.empty_file, message, hints=("for this machine alone: `localhost slots=4`",)))
    hosts, mistakes = join_lines(lines)
    return hosts, found + mistakes


def join_lines(lines: list[HostLine]) -> tuple[list[Host], list[Diagnostic]]:
    """Make one host of all lines that name it, and report contradictions between them and too many slots in all."""
    hosts, found = _merge(lines)
    return hosts, found + _too_many(hosts)


def _too_many(hosts: list[Host]) -> list[Diagnostic]:
    total = sum(host.slots for host in hosts)
    if total <= _MOST_SLOTS_IN_ALL:
        return []
    largest = max(hosts, key=lambda host: host.slots)
    message = f"the hosts offer {total} slots in all; at most {_MOST_SLOTS_IN_ALL} were expected"
    return [mistake_at(codes.SLOTS, message, largest.slots_span, label=f"{largest.slots} of them")]


def _parse_line(words: list[str], spans: list[Span]) -> tuple[list[HostLine], list[Diagnostic]]:
    hosts, found = parse_names(words[0], spans[0])
    counts: dict[str, tuple[int, Span]] = {}
    for word, span in zip(words[1:], spans[1:], strict=True):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in _SLOTS:
            found.append(_unknown_word(key, value, span, host=words[0]))
            if "=" not in word:
                break  # likely another host, with its own words after it
            continue
        count, mistake = parse_count(key, value, span)
        kind = "slots" if key == "slots" else "max_slots"
        if mistake:
            found.append(mistake)
        elif kind in counts:
            message = f"host `{shown(words[0])}` gets `{key}` twice on one line"
            found.append(mistake_at(codes.HOST_TWICE, message, span, other=(counts[kind][1], "first here")))
        else:
            counts[kind] = (count, span)
    most, slots = counts.get("max_slots"), counts.get("slots")
    if most and slots and most[0] < slots[0]:
        message = f"`max_slots={most[0]}` is less than `slots={slots[0]}`"
        label = f"expected {slots[0]} or more"
        found.append(mistake_at(codes.SLOTS, message, most[1], label=label, other=(slots[1], "")))
    return [replace(host, counts=counts) for host in hosts], found


def parse_names(word: str, span: Span) -> tuple[list[HostLine], list[Diagnostic]]:
    """Return the hosts that one word names: a host, a login name and a host, or ranges of hosts in brackets."""
    before, at, after = word.rpartition("@")
    user, name = (before, after) if at else (None, word)
    if user is not None and (problem := user_name_problem(user)):
        place = replace(span, length=max(1, len(user)))
        return [], [mistake_at(codes.HOST_NAME, f"`{shown(user)}` cannot be a login name", place, label=problem)]
    place = replace(span, column=span.column + len(word) - len(name), length=max(1, len(name)))
    names = expand_ranges(name)
    if isinstance(names, str):
        return [], [mistake_at(codes.HOST_NAME, f"`{shown(name)}` cannot be a host name", place, label=names)]
    for each in names:
        problem = host_name_problem(each)
        if problem:
            message = f"`{shown(each)}` cannot be a host name"
            return [], [mistake_at(codes.HOST_NAME, message, place, label=problem, hint=_name_hint(name))]
    return [HostLine(each, user, place) for each in names], []


def _name_hint(name: str) -> str:
    host, colon, count = name.partition(":")
    if colon and _COUNT.match(count):
        return f"write `{shown(host)} slots={shown(count)}`"
    if name.partition("=")[0] in _SLOTS:
        return f"name the host first: `HOST {shown(name)}`"
    return "write one host a line" if "," in name else ""


def _unknown_word(key: str, value: str, span: Span, *, host: str) -> Diagnostic:
    written = f"{key}={value}" if value else key
    message = f"unknown word `{shown(written)}` after host `{shown(host)}`"
    meant = closest(key, _SLOTS)
    if _COUNT.match(key) and not value:
        hint = f"did you mean `slots={shown(key)}`?"
    elif key == "port":
        hint = "write `port: N` in cluster.yaml, which lies beside the hostfile"
    elif key in {"user", "username", "user_name"}:
        hint = f"write the login name before the host: `{shown(value) or 'USER'}@{shown(host)}`"
    elif meant:
        hint = f"did you mean `{meant}`?"
    else:
        hint = "write one host a line; a comment begins with `#`"
    return mistake_at(codes.HOSTFILE_WORD, message, span, label="expected `slots=` or `max_slots=`", hint=hint)


def parse_count(key: str, value: str, span: Span) -> tuple[int, Diagnostic | None]:
    """Read a number of slots, the value of `key`, whose text ends where `span` does."""
    if _COUNT.match(value) and len(value) < 10 and 0 < int(value) <= _MOST_SLOTS:  # noqa: PLR2004 - digits
        return int(value), None
    place = replace(span, column=span.column + span.length - len(value), length=len(value)) if value else span
    message = f"`{key}` is `{shown(value)}`" if value else f"`{key}` has no value"
    expected = f"a whole number from 1 to {_MOST_SLOTS}"
    message = f"{message}; {expected} was expected"
    hint = "to leave the host out, put `#` before its line" if key in _SLOTS and value and not value.strip("0") else ""
    return 0, mistake_at(codes.SLOTS, message, place, label=f"expected {expected}", hint=hint)


def _merge(lines: list[HostLine]) -> tuple[list[Host], list[Diagnostic]]:
    """Add up the lines of each host; mpirun identifies a host by the part of its name before the first dot."""
    hosts: dict[str, Host] = {}
    found: list[Diagnostic] = []
    for line in lines:
        # Parts after the first dot distinguish addresses, but not the names of one machine.
        key = line.name.lower() if _ADDRESS.match(line.name) else line.name.lower().split(".")[0]
        earlier = hosts.get(key)
        if earlier is None:
            hosts[key] = _host(line)
        elif line.counts or earlier.name != line.name or earlier.user != line.user:
            found.append(_twice(earlier, line))
        else:
            hosts[key] = replace(earlier, slots=earlier.slots + 1)
    return list(hosts.values()), found


def _host(line: HostLine) -> Host:
    most = line.counts.get("max_slots")
    slots, span = line.counts.get("slots") or most or (1, line.span)
    return Host(HostName(line.name), slots, line.span, span, max_slots=most[0] if most else None, user=line.user)


def _twice(first: Host, again: HostLine) -> Diagnostic:
    place, label, note, hint = again.span, "", "", ""
    if first.name.lower() != again.name.lower():
        short = again.name.split(".")[0]
        message = f"hosts `{shown(first.name)}` and `{shown(again.name)}` are both `{shown(short)}` to mpirun"
        note = "mpirun knows a host by the part of its name before the first dot"
    elif first.name != again.name:
        message = f"hosts `{shown(first.name)}` and `{shown(again.name)}` differ only in letter case"
        label = "the same machine"
    elif first.user != again.user:
        message = f"host `{shown(again.name)}` is listed with two login names"
    else:
        slots, place = again.counts.get("slots") or again.counts["max_slots"]
        message, label = f"host `{shown(again.name)}` is listed again with a number of slots", "and again here"
        note = "mpirun adds up lines of a host only if they have no `slots=`"
        hint = f"write one line: `{shown(again.name)} slots={first.slots + slots}`"
    other = (first.span, "first listed here")
    return mistake_at(codes.HOST_TWICE, message, place, label=label, other=other, note=note, hint=hint)


def hostfile_of_rankfile(source: Source) -> str:
    """Return the hint that shows the lines of the hostfile that gives each rank the host of a rankfile; empty for other texts."""
    ranked = [match for line in source.lines if (match := _RANKFILE.match(line))]
    hosts = [match["host"] for match in sorted(ranked, key=lambda match: int(match["rank"]))]
    blocks = Counter(name for name, _ in groupby(hosts))
    names = {name: shown(name, longest=_LONGEST_SHOWN) for name in blocks}
    lines = [f"`{names[name]} slots={count}`" for name, count in list(Counter(hosts).items())[:_MOST_LINES_SHOWN]]
    torn = next((name for name, count in blocks.items() if count > 1), None)
    if torn is not None:
        caveat = f"there the ranks of one host follow each other, so renumber those of `{names[torn]}`"
        return f"as a hostfile, one line each: {', '.join(lines)}; {caveat}"
    return f"the same as a hostfile, one line each: {', '.join(lines)}" if lines else ""


def _rankfile(source: Source) -> Diagnostic | None:
    """If the text is a rankfile, return a diagnostic with the equivalent hostfile."""
    ranked = [(number, match) for number, line in enumerate(source.lines, start=1) if (match := _RANKFILE.match(line))]
    if not ranked:
        return None
    slots = Counter(match["host"] for _, match in ranked)
    number, first = ranked[0]
    text = source.line(number)
    span = Span(source, number, len(text) - len(text.lstrip()) + 1, len(text.strip()))
    message = f"{source.name} is a rankfile, not a hostfile: `{shown(text.strip())}`"
    label = f"as a line of a hostfile: `{shown(first['host'])} slots={slots[first['host']]}`"
    note = "ranks take the slots in the order of the hostfile, so it needs no rank numbers"
    hint = hostfile_of_rankfile(source)
    return mistake_at(codes.RANKFILE, message, span, label=label, note=note, hint=hint)
