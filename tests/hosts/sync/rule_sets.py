"""Random `.gitignore` files and trees."""

import subprocess
from dataclasses import dataclass

NAMES = [
    "a",
    "b",
    "c",
    "ab",
    "abc",
    "a.b",
    "foo",
    "bar",
    "data",
    "keep",
    "build",
    "A",
    "x.py",
    "[a]",
    "!a",
    "#a",
    "*",
    "-",
    "]",
    "^",
    ".x",
    "é",
    "a b",
    " ",
    "a ",
    "b\\",
    "\t",
]
WILD = [
    "*",
    "*",
    "**",
    "?",
    "[ab]",
    "[!a]",
    "[^b]",
    "[a-c]",
    "[c-a]",
    "[-a]",
    "[]a]",
    "[!]a]",
    "[[:alpha:]]",
    "[[:punct:]x]",
    "[[:space:]]",
    "[a\\]b]",
    "[[a]",
    "[a",
    "[[:no:]]",
    "[:a:]",
    "\\",
]
WILD += ["***", "[]-a]", "[a-]", "[!-~]", "[\\a-c]", "[a\\-c]", "[[:upper:][:digit:]]", "[/a]", "a[!b]c"]
LINE_ENDS = ["", "", "", "", "", "", " ", "  ", "\\ ", "\\", "\t", "\r", "/", "/ ", "\\  ", "\0x"]


@dataclass(frozen=True)
class RuleSet:
    """Rule files and a tree.

    Attributes:
        rules: The text of `.gitignore` by folder.
        files: Paths of files; one that ends in `/` is an empty folder.
    """

    rules: dict[str, bytes]
    files: list[str]


def draw_rule_set(random, *, quirks):
    """Draw one; with `quirks` also patterns such as `a**/b`, which versions of git read differently."""
    paths = {"/".join(random.choices(NAMES, k=random.randint(1, 4))) for _ in range(random.randint(4, 24))}
    files = [path for path in sorted(paths) if not any(other.startswith(path + "/") for other in paths)]
    files = [path + "/" * (random.random() < 0.1) for path in files]
    folders = sorted({path.rpartition("/")[0] for path in files} - {""})
    chosen = ["", *random.sample(folders, min(len(folders), random.choice([0, 0, 1, 2])))]
    return RuleSet({folder: _text(random, files, quirks=quirks) for folder in chosen}, files)


def _text(random, files, *, quirks):
    lines = [_line(random, files, quirks=quirks) for _ in range(random.randint(1, 7))]
    text = "".join(line + random.choice(["\n"] * 8 + ["\r\n"]) for line in lines)
    return (random.choice(["", "", "", "\ufeff"]) + text.removesuffix(random.choice(["", "\n"]))).encode()


def _line(random, files, *, quirks):
    if random.random() < 0.75:  # near a path of the tree, so that something matches
        parts = random.choice(files).rstrip("/").split("/")
        begin = random.randrange(len(parts))
        parts = parts[begin : random.randint(begin, len(parts)) + 1]
        parts = [random.choice([part, part, part, "*", "**", part[:1] + "*", "?" * len(part)]) for part in parts]
        pattern = (
            random.choice(["", "", "/", "**/", "*/"]) + "/".join(parts) + random.choice(["", "", "/", "/*", "/**"])
        )
    else:
        pieces = random.choices(
            [*NAMES, *WILD, "/", "/", "/", "**/", "/**", "/**/", "\\a", "\\/", "\\*"], k=random.randint(1, 6)
        )
        pattern = "".join(pieces)
    special = min((pattern.find(each) for each in "*?[\\" if each in pattern), default=0)
    if not quirks and special and pattern[special - 1] != "/" and pattern[special:].startswith("**"):
        pattern = pattern[:special] + pattern[special + 1 :].lstrip("*")
    return random.choice(["", "", "", "", "", "!", "!", "\\!", "#", "!!"]) + pattern + random.choice(LINE_ENDS)


def has_quirk(folder, environment):
    """Return whether the installed git lets the `**` of `a**/b` match any number of folders, as version 2.39 does."""
    write(RuleSet({"": b"a**/b\n"}, ["ax/y/b"]), folder)
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    return (
        "ax/y/b"
        not in subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    )


def write(drawn, folder):
    for path in drawn.files:
        full = folder / path
        (full if path.endswith("/") else full.parent).mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            full.touch()
    for where, text in drawn.rules.items():
        (folder / where).mkdir(parents=True, exist_ok=True)
        (folder / where / ".gitignore").write_bytes(text)
    subprocess.run(["git", "init", "-q", "--template="], cwd=folder, check=True)
