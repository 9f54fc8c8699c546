"""Take the pictures of the dashboard anew: `python docs/pictures.py RUNS_DIR`, a folder with runs of which the newest has failed.

Each view in light and in dark, 1300 pixels wide, from Debian's Chromium; needs playwright.
"""

import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

from ttlaunch.dashboard.opening import open_dashboard

IMAGES = Path(__file__).with_name("images")
WIDTH, HEIGHT = 1300, 820
DRAWN_MS = 1200


def main(runs: Path) -> None:
    """Write `images/dashboard-VIEW-SCHEME.png`."""
    names = sorted(path.name for path in runs.iterdir() if (path / "plan.json").is_file())
    done, failed = (f"#/run/{name}" for name in (names[0], names[-1]))
    views = {
        "runs": "#/",
        "launch": "#/launch",
        "failed": failed,
        **{view: f"{done}/{view}" for view in ("metrics", "topology", "steps", "configuration", "checkpoints")},
        "logs": f"{failed}/logs",
    }
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
