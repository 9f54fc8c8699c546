"""Hostile names, keys, texts and output in every input of every command: none of their control characters arrives."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
import unicodedata

import pytest
import typer

from ttlaunch import contract
from ttlaunch.cli.main import app

EVIL = "a\x1b]0;title\x07\x1b[35;7mb\x9b2Jc\u202ed\u2028e\u200bf\U000e0041g\x7fh\x1b[2J\nFORGED\r[bold]i[link=http:x]j"
"""A title, colours, erasing in C0 and C1, reversed text, line ends of three kinds, invisible text, and markup of rich."""
OWN_SEQUENCES = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\r*\x1b\[[0-9]*[AK]|\r+\n")
MODES = ("pipes", "terminal")
DRIVER = """
import importlib, json, os, pkgutil, sys
import rich.console, rich.panel, ttlaunch
from ttlaunch.__main__ import main
commands = json.load(open(sys.argv[1]))
for module in pkgutil.walk_packages(ttlaunch.__path__, "ttlaunch."):  # once here, not in every child
    if len(commands) > 1 and module.name.split(".")[1] in {"app", "cli", "draw", "planning", "running", "spec"} and ".to_" not in module.name:
        importlib.import_module(module.name)
for words in commands:
    pid = os.fork()
    if pid == 0:
        sys.argv = ["ttlaunch", *words]
        try:
            main()
        finally:
            sys.stdout.flush(); sys.stderr.flush(); os._exit(0)
    os.waitpid(pid, 0)
"""


def read_all(descriptor, into):
    """Read until the other side is closed, in a thread."""

    def read():
        try:
            while piece := os.read(descriptor, 65536):
                into.append(piece)
        except OSError:  # how a terminal ends
            pass

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def printed(folder, commands, *, mode):
    """What these commands print to stdout and to stderr, each on a terminal or in a pipe."""
    (folder / "commands.json").write_text(json.dumps(commands))
    ends = [pty.openpty() if mode == "terminal" or (mode != "pipes" and number) else os.pipe() for number in range(2)]
    environment = {**os.environ, "COLUMNS": "500", "TERM": "xterm", "TTLAUNCH_NO_REGISTRY": "1"}
    environment.pop("NO_COLOR", None)
    found = [], []
    readers = [read_all(end[0], into) for end, into in zip(ends, found, strict=True)]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder / "commands.json")],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=ends[0][1],
        stderr=ends[1][1],
    )
    for end in ends:
        os.close(end[1])
    process.wait(timeout=200)
    for reader, end in zip(readers, ends, strict=True):
        reader.join()
        os.close(end[0])
    assert 0 == process.returncode
    return [b"".join(parts).decode() for parts in found]


def raw_characters(text):
    """The characters of a text that steer a terminal, with a few before them; line ends and our own colours do not count."""
    text = text.replace("\x1b[35;7m", "\x1b!")  # the attack's colour is none of ours
    text = OWN_SEQUENCES.sub("\n", text) if "\x1b" in text else text.replace("\r\n", "\n")
    wrong = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    found = [
        text[max(0, at - 60) : at + 10]
        for at, character in enumerate(text)
        if unicodedata.category(character) in wrong and character not in "\n\t"
    ]
    forged = [line for line in re.split(r"[\n\r]", text) if line.strip().startswith("FORGED")]
    links = [text[max(0, at.start() - 60) : at.end() + 20] for at in re.finditer(r"\x1b\]8", text)]
    return (found + forged + links)[:5]


def leaves(command, path=()):
    """The words of every subcommand."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*path, name))
    else:
        yield list(path)


COMMANDS = list(leaves(typer.main.get_command(app)))
FORMATS = ("full", "concise", "github", "json")


@pytest.fixture
def hostile_run(here):
    """A folder `runs/evil` whose files have hostile text wherever a host, a rank or a plan can put one."""
    run = here / "runs" / "evil"
    for folder in (contract.LOGS_DIR, contract.RECORDS_DIR):
        (run / folder).mkdir(parents=True)
    row = {"rank": 0, "host": EVIL, "slot": 0, "role": EVIL}
    plan = {"recipe": {"name": EVIL, "folder": f"/nowhere/{EVIL}"}, "layout": EVIL, "ranks": [row], "environment": {}}
    ended = {"rank": 0, "role": EVIL, "host": EVIL, "state": EVIL, "step": 1, "unkept_output": {EVIL: 3}}
    operation = {"operation": EVIL, "peer": EVIL, "step": 1, "is_finished": False}
    failure = {"code": "R001", "message": EVIL, "rank": 0, "host": EVIL, "evidence": [EVIL], "time": 1.0}
    report = {"status": "failed", "exit_status": 1, "steps": 1, "failure": failure, "results": {EVIL: EVIL}}
    report |= {"ranks": [ended | {"unkept_reason": EVIL, "last_operation": operation}], "run_id": EVIL, "name": EVIL}
    lines = [
        {"kind": "started", "time": 1.0, "pid": 1, "host": EVIL},
        {"kind": "ready", "time": 1.0},
        {"kind": "note", "time": 1.0, "text": EVIL},
        {"kind": "layer_norms", "time": 1.0, "step": 1, "norms": {EVIL: 1.0}},
        {"kind": "step", "time": 1.0, "step": 1, "loss": 1.0, EVIL: 2.0},
        {"kind": EVIL, "time": 1.0, "step": 1, EVIL: 3.0},
        {"kind": "result", "time": 1.0, "values": {EVIL: EVIL}},
        {"kind": "lost_checkpoint", "time": 1.0, "step": 1, "reason": EVIL},
    ]
    error = {"type": EVIL, "message": EVIL, "traceback": EVIL, "file": EVIL, "line": 1, "role": EVIL, "time": 1.0}
    events = [{"time": 1.0, "event": EVIL, "host": EVIL, EVIL: EVIL}]
    contents = {
        contract.PLAN_FILE: json.dumps(plan),
        contract.REPORT_FILE: json.dumps(report),
        contract.EVENTS_FILE: "".join(json.dumps(one) + "\n" for one in events),
        contract.progress_file(0): "".join(json.dumps(one) + "\n" for one in lines),
        contract.error_file(0): json.dumps(error),
        contract.traffic_file(0): json.dumps({"first": 1, "last": 1, "facts": {EVIL: 1}, "sent": [], "waited": []})
        + "\n",
    }
    for name, content in contents.items():
        (run / name).write_text(content)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_command_repeats_control_characters_of_its_arguments(here, mode):
    commands = [[*words, extra] for words in COMMANDS for extra in (EVIL, f"--{EVIL}")]
    commands += [[EVIL], [f"--{EVIL}"], ["run", "hierarchical_parallel", "--set", EVIL], ["plan", "--on", EVIL]]
    commands += [["run", "hierarchical_parallel", "--set", f"{EVIL}=1"], ["doctor", "--hosts", EVIL]]
    for text in printed(here, commands, mode=mode):
        assert [] == raw_characters(text)


@pytest.mark.parametrize("mode", MODES)
def test_no_command_shows_control_characters_of_a_run(here, hostile_run, mode):
    hostile_run.with_name(EVIL).symlink_to("evil")
    (hostile_run / "logs" / "supervisor.stderr").write_text(EVIL)
    named = (
        "report",
        "logs",
        "metrics",
        "attach",
        "stop",
        "diff {} evil",
        "repro",
        "weights show",
        "report --communication",
    )
    commands = [
        [*words.replace("{}", name).split(" "), *([] if "{}" in words else [name]), "--format", form]
        for words in named
        for name in ("evil", EVIL)
        for form in FORMATS
        if (name == "evil" and form == "full") or (name == EVIL) != words.startswith("diff")  # a diff names both
    ]
    commands += [["ps", "--all", "--format", form] for form in FORMATS]
    commands += [["runs", "clean", "--dry-run", "--format", form] for form in FORMATS]
    for text in printed(here, commands, mode=mode):
        assert text
        assert [] == raw_characters(text)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_command_shows_control_characters_of_a_file_or_its_name(here, mode):
    recipe = here / "recipes" / "evil"
    recipe.mkdir(parents=True)
    source = f"from ttlaunch.recipe import BaseConfig, Recipe\nRECIPE = Recipe(summary={EVIL!r}, config=BaseConfig, layouts={{}}, flows=())\n"
    (recipe / "recipe.py").write_text(source)
    (recipe / "train.yaml").write_text(f"{json.dumps(EVIL)}: {json.dumps(EVIL)}\n")
    (recipe.with_name(EVIL)).mkdir()
    (recipe.with_name(EVIL) / "recipe.py").write_text(f"raise ValueError({EVIL!r})\n")
    cluster = here / "configurations" / "evil"
    cluster.mkdir(parents=True)
    hosts = f"{EVIL.split(chr(10), maxsplit=1)[0]} slots=1\nok slots=x\u202e\n"
    (cluster / "hosts.txt").write_text(hosts)
    (cluster / "rank_bindings.yaml").write_text(f"rank_bindings:\n  - {{{json.dumps(EVIL)}: {json.dumps(EVIL)}}}\n")
    header = json.dumps({EVIL: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (here / "evil.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    odd = json.dumps({"w": {"dtype": EVIL, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (here / "odd.safetensors").write_bytes(len(odd).to_bytes(8, "little") + odd + bytes(4))
    (here / EVIL).write_text(EVIL)
    lines = (
        "recipes list",
        "recipes show evil",
        "configs list",
        "validate evil",
        f"validate {cluster}/hosts.txt",
        f"validate {recipe}/train.yaml",
        "plan evil",
        "plan evil --on evil",
        "show evil",
        "place evil --on evil",
        "weights show evil.safetensors",
        "weights show odd.safetensors",
        "convert configurations/evil",
        "doctor --on evil",
        "sync evil --on evil",
    )
    commands = [[*line.split(" "), "--format", form] for line in lines for form in FORMATS]
    commands += [[*words, EVIL] for words in (["validate"], ["weights", "show"], ["convert"], ["run"])]
    for text in printed(here, commands, mode=mode):
        assert text
        assert [] == raw_characters(text)


def hostile_output(here):
    """A finished run whose rank has printed everything that a terminal can be told."""
    run = here / "runs" / "loud"
    for folder in (contract.LOGS_DIR, contract.RECORDS_DIR):
        (run / folder).mkdir(parents=True)
    row = {"rank": 0, "host": "box", "slot": 0, "role": "worker"}
    (run / contract.PLAN_FILE).write_text(json.dumps({"recipe": {"name": "m", "folder": "/n"}, "ranks": [row]}))
    line = "10 %\r20 %\ta\x1b]0;title\x07\x1b[2J\x9b2J\u202e\x1b[35;7mloud\n".encode()
    (run / contract.stdout_file(0)).write_bytes(line)
    return line


def test_logs_on_a_terminal_keep_tab_and_colours_and_nothing_else(here):
    hostile_output(here)
    shown, _ = printed(here, [["logs", "loud"]], mode="terminal")
    assert "rank 0 worker | 20 %\ta\\u202e\x1b[35;7mloud\x1b[0m\r\n" == shown


@pytest.mark.parametrize(("words", "mode"), [(["logs", "loud"], "pipes"), (["logs", "loud", "--raw"], "terminal")])
def test_logs_give_every_byte_of_a_line_to_a_pipe_and_with_raw(here, words, mode):
    line = hostile_output(here)
    shown, _ = printed(here, [words], mode=mode)
    assert "rank 0 worker | " + line.decode().rpartition("\r")[2] == shown.replace("\r\n", "\n")
