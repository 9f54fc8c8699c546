"""One file that shows a finished run as the page does, without a server: for an issue or a mail."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from ttlaunch.dashboard.numbers import MOST_POINTS
from ttlaunch.dashboard.page import FILES, SCRIPTS
from ttlaunch.dashboard.reading import Reading
from ttlaunch.running.logs.pages import MOST_LINES

_MOST_STEPS = 40
_LOGS: Final = {"folded": "1", "whole": ""}
_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async |const |class |function)", re.MULTILINE)


def export_run(path: Path) -> bytes:
    """Return the page of a run as one HTML document that loads nothing.

    Its modules stand in one script, each after those that it imports, and the answers of a server to what they ask for beside it.

    Args:
        path: The run's folder.

    Raises:
        OSError: The run's folder cannot be read.
        ValueError: A file of it has another content.
    """
    saved = json.dumps({"run": path.name, "answers": _answers(path)}, ensure_ascii=False)
    styles = [_text("uplot.css"), _text("page.css")]
    scripts = [_text("uplot.js"), "".join(map(_module, SCRIPTS))]
    icon = base64.b64encode((FILES / "icon.svg").read_bytes()).decode()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"img-src data:; style-src {' '.join(map(_hash, styles))}",
            f"script-src {' '.join(map(_hash, scripts))}",
            *(f"{place} 'none'" for place in ("base-uri", "form-action")),
            "require-trusted-types-for 'script'",
        )
    )
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        "<title>ttlaunch</title>",
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">',
        *(f"<style>{style}</style>" for style in styles),
        # What is written as \u003c ends no element, and is the same text for a reader of JSON.
        f'<script type="application/json" id="saved">{saved.replace("<", chr(92) + "u003c")}</script>',
        f"<script>{scripts[0]}</script>",
        f'<script type="module">{scripts[1]}</script>',
    ]
    page = _text("index.html")
    body = page[page.index("<body>") : page.index("</html>")]
    return "\n".join(['<!doctype html>\n<html lang="en">\n<head>', *head, "</head>", body, "</html>\n"]).encode()


def _answers(path: Path) -> dict[str, Any]:
    """Return what the page asks a server for, by path; for the numbers and the output, all that it may want a part of."""
    reading, run = Reading(path.parent), path.name
    live = reading.live(run)
    names = live.names()
    lines = {kind: reading.logs(run, query={"fold": fold}, most=MOST_LINES) for kind, fold in _LOGS.items()}
    answers = {
        "": reading.facts(run),
        "/numbers": names,
        "/series": {name: live.series(name, first=None, last=None, most=MOST_POINTS) for name in names["names"]},
        "/steps": reading.steps(run, most=_MOST_STEPS),
        "/cluster": reading.picture(run),
        "/serving": reading.serving(run),
        "/logs": lines,
    }
    return {f"/api/runs/{quote(run, safe='')}{part}": answer for part, answer in answers.items()}


def _module(name: str) -> str:
    return _EXPORT.sub("", _IMPORT.sub("", _text(f"{name}.js")))


def _text(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
