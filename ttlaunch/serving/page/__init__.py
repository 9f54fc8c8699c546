"""The chat page: HTML, CSS and ES modules without a build step, and the routes by which a server offers them.

The page asks only the server that it came from, for `/config`, `/health`, `/chat` and `/memory/…`, so that it needs the same
routes beside its own.
"""

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("connect", "img", "script", "style")),
        *(f"{place} 'none'" for place in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
    )
)
"""What the page may do: load its own files and ask its own server. No inline code, no `eval`, no HTML from texts."""

_FILES = Path(__file__).with_name("files")
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_routes() -> list[Route]:
    """Return the routes `/` and `/page/FILE`. The files are read once, now; no request names a path."""
    routes = []
    for file in sorted(_FILES.iterdir()):
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        routes.append(_route(path, file.read_bytes(), media_type=_TYPES[file.suffix]))
    return routes


def _route(path: str, content: bytes, *, media_type: str) -> Route:
    headers = {
        "cache-control": "no-cache",  # after an update, a browser must not mix old files with new ones
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def answer(request: Request) -> Response:  # noqa: ARG001 - starlette passes the request and awaits
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, answer, methods=["GET"])
