"""The documentation is true: links lead somewhere, commands exist, generated pages are what the code says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from ttlaunch.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/README.md")])
SHELL_BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"--?[a-z][a-z-]*")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
TEST = re.compile(r"\[`(test_\w+)`\]\(([^)]+\.py)\)")


@pytest.fixture(scope="module")
def texts():
    """By page, its text."""
    return {page: page.read_text(encoding="utf-8") for page in PAGES}


def name(path):
    return str(path.relative_to(ROOT))


def test_every_link_leads_to_a_file(texts):
    links = [(page, target) for page, text in texts.items() for target in LINK.findall(text)]

    assert [] == [(name(page), target) for page, target in links if not (page.parent / target).exists()]


def test_every_test_that_a_page_names_is_in_the_file_that_it_links(texts):
    named = [(page, test, file) for page, text in texts.items() for test, file in TEST.findall(text)]
    sources = {path: path.read_text(encoding="utf-8") for path in {page.parent / file for page, _, file in named}}

    assert [] == [(name(page), test) for page, test, file in named if f"def {test}(" not in sources[page.parent / file]]


def commands_of(text):
    lines = [line.removeprefix("$ ") for block in SHELL_BLOCK.findall(text) for line in block.splitlines()]
    return [line for line in lines if line.startswith("ttlaunch ") and "…" not in line and "[OPTIONS]" not in line]


def test_every_command_and_option_in_a_page_exists(texts):
    root = get_command(app)

    for page, line in ((page, line) for page, text in texts.items() for line in commands_of(text)):
        words = shlex.split(line, comments=True)[1:]
        command = root
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}
        typed = words[: words.index("--")] if "--" in words else words
        options = {word.partition("=")[0] for word in typed if OPTION.fullmatch(word.partition("=")[0])}
        assert command is not root or options, f"{name(page)}: {line}"
        assert options <= known, f"{name(page)}: {line}"


def test_the_generated_reference_is_what_the_code_says():
    answer = subprocess.run(
        [sys.executable, str(ROOT / "docs/generate.py"), "--check"], capture_output=True, text=True, check=False
    )

    assert ("", 0) == (answer.stderr, answer.returncode)


def test_the_readme_names_every_recipe():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert [] == [folder.name for folder in ROOT.glob("recipes/*/") if f"recipes/{folder.name}/" not in readme]


def test_help_texts_leave_the_ends_of_lines_to_the_terminal():
    """A line break in a later paragraph of a docstring would be shown as one, in the middle of a sentence."""
    commands = get_command(app).commands
    broken = [
        name
        for name, command in commands.items()
        if any("\n" in part for part in (command.help or "").split("\n\n")[1:])
    ]
    assert [] == broken


def test_every_command_stands_in_a_panel_of_the_help():
    commands = get_command(app).commands.values()

    assert {"Run", "Look", "Hosts", "Files", "Lab"} == {command.rich_help_panel for command in commands}
