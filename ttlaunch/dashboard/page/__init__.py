"""The page: HTML, CSS and ES modules without a build step, and uPlot for charts; every file is part of the wheel."""

from pathlib import Path
from typing import Final

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("connect", "img", "script", "style")),
        *(f"{place} 'none'" for place in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
    )
)
"""What the page may do: load its own files and ask its own server. No inline code, no `eval`, no HTML from texts."""

FILES: Final = Path(__file__).with_name("files")
TYPES: Final = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
SCRIPTS: Final = (
    "api",
    "dom",
    "charts",
    "members",
    "actions",
    "runs",
    "overview",
    "metrics",
    "steps",
    "topology",
    "serving",
    "logs",
    "settings",
    "main",
)
"""The page's own modules, each after those that it imports."""


def page_files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the type of each file by the path at which a server offers it."""
    return {
        "/" if path.name == "index.html" else f"/page/{path.name}": (path.read_bytes(), TYPES[path.suffix])
        for path in sorted(FILES.iterdir())
        if path.suffix in TYPES
    }
