"""The page behind every code: what it checks, why it matters, an example that a test runs, and the repair.

A page is `pages/CODE.md`. Its first line is `# CODE: title`. Fenced blocks under `## Example` whose info string begins
with a file name are the files of the example; the word after the name says what Markdown cannot show: `crlf` (Windows
line ends), `bom` (a byte-order mark), `utf-16` (the encoding), `missing` (there is no such file).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PAGES = Path(__file__).parent / "pages"
_CODE = re.compile(r"[A-Z][0-9]{3}\Z")
_TITLE = re.compile(r"# (?P<code>[A-Z][0-9]{3}): (?P<title>.+)\n")
_BLOCK = re.compile(
    r"^```(?P<name>[^\s`]+\.[a-z]+)(?: (?P<flag>[a-z0-9_-]+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class ExampleFile:
    """A file of an example.

    Attributes:
        flag: What Markdown cannot show; empty for a plain file.
    """

    name: str
    text: str
    flag: str = ""

    @property
    def content(self) -> bytes | None:
        """Return the bytes of the file; None if the example is about its absence."""
        match self.flag:
            case "missing":
                return None
            case "crlf":
                return self.text.replace("\n", "\r\n").encode()
            case "bom":
                return b"\xef\xbb\xbf" + self.text.encode()
            case "utf-16":
                return self.text.encode("utf-16")
            case _:
                return self.text.encode()


@dataclass(frozen=True)
class Page:
    """What `ttlaunch explain CODE` shows."""

    code: str
    title: str
    text: str
    files: tuple[ExampleFile, ...]

    def contents(self, base: Mapping[str, str]) -> dict[str, bytes]:
        """Return the files of the example: its own, and under all other names those of `base`, which have no mistake."""
        contents = {name: text.encode() for name, text in base.items()}
        own = {file.name: file.content for file in self.files}
        return {name: data for name, data in (contents | own).items() if data is not None}


def known_codes() -> list[str]:
    """Return all codes that have a page, in order."""
    return sorted(path.stem for path in _PAGES.glob("*.md") if _CODE.match(path.stem))


def load_page(code: str) -> Page | None:
    """Return the page of a code, in any letter case; None if there is none."""
    code = code.strip().upper()
    if not _CODE.match(code) or not (_PAGES / f"{code}.md").is_file():
        return None
    text = (_PAGES / f"{code}.md").read_text(encoding="utf-8")
    title = _TITLE.match(text)
    files = tuple(ExampleFile(m["name"], m["text"], m["flag"] or "") for m in _BLOCK.finditer(text))
    return Page(code, title["title"] if title else "", text, files)
