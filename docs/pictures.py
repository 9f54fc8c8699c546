"""Take the pictures of the dashboard anew: `python docs/pictures.py RUNS_DIR`.

The folder has a run of `hierarchical_parallel` that is done, one that has failed, an elastic one that a worker has left, a serving one, and a failed one
of a script that prints. Make them in a clone at a place that may be shown, since paths of the machine are in the pictures. Each view in light and in dark, 1300 pixels wide, from Debian's Chromium; needs playwright.
"""

import json
import shutil
import sys
import threading
from pathlib import Path

from ttlaunch.dashboard.opening import open_dashboard

IMAGES = Path(__file__).with_name("images")
WIDTH, HEIGHT = 1300, 820
DRAWN_MS = 2500


def main(runs: Path) -> None:
    """Write `images/dashboard-VIEW-SCHEME.png`."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - the names of the views need no browser

    views = views_of(**{kind: f"#/run/{name}" for kind, name in find_runs(runs).items()})
    opened = open_dashboard(runs, port=0, may_act=True)
    threading.Thread(target=opened.serve, daemon=True).start()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            page.goto(opened.link)
            for name, view in views.items():
                page.evaluate("view => { location.hash = view }", view)
                page.wait_for_timeout(DRAWN_MS)
                page.screenshot(path=IMAGES / f"dashboard-{name}-{scheme}.png")
        browser.close()


def views_of(*, done: str, failed: str, elastic: str, serving: str, printed: str) -> dict[str, str]:
    """Return the address of each view by its name; arguments are those of runs."""
    return {
        "runs": "#/",
        "launch": "#/launch",
        "failed": failed,
        **{view: f"{done}/{view}" for view in ("metrics", "topology", "steps", "configuration", "checkpoints")},
        "logs": f"{printed}/logs",
        "members": f"{elastic}/topology",
        "streams": f"{serving}/streams",
    }


def find_runs(runs: Path) -> dict[str, str]:
    """Return the ids of a run that is done, of one that failed, of an elastic one, a serving one, and one of a script that failed."""
    found: dict[str, str] = {}
    for path in sorted(path for path in runs.iterdir() if (path / "report.json").is_file()):
        kind = json.loads((path / "report.json").read_text())["status"]
        if (path / "members.jsonl").is_file():
            kind = "elastic"
        elif (path / "door.json").is_file():
            kind = "serving"
        elif any(log.stat().st_size for log in path.glob("logs/rank-*.stdout")):
            kind = "printed"
        found[kind] = path.name
    return {kind: found[kind] for kind in ("done", "failed", "elastic", "serving", "printed")}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
