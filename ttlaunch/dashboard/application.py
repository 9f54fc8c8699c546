"""The application of the page: its files, and what they ask for, behind the guard of `ttlaunch/web`.

Everything is read with GET and HEAD; other methods are refused, but for those of `--allow-actions`.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from ttlaunch import __version__
from ttlaunch.dashboard.numbers import MOST_POINTS
from ttlaunch.dashboard.page import CONTENT_SECURITY_POLICY, page_files
from ttlaunch.dashboard.reading import Reading, UnknownRunError
from ttlaunch.diagnostics import LaunchError, render
from ttlaunch.diagnostics.explain import load_page
from ttlaunch.system_reason import system_reason
from ttlaunch.web.guard import Guard, Refusal, Rules

if TYPE_CHECKING:
    from ttlaunch.dashboard.actions import Actions

_POLL_S: Final = 0.2
_ALIVE_S: Final = 15.0
_MOST_ROWS = 500


def make_application(
    reading: Reading,
    *,
    names: frozenset[str],
    key: str,
    is_ending: Callable[[], bool] = lambda: False,
    actions: "Actions | None" = None,
) -> ASGIApp:
    """Make the application.

    Args:
        reading: What reads the runs.
        names: What the `Host` of a request may name.
        key: What the page has to send as `Authorization: Bearer KEY` with everything but its own files.
        is_ending: Whether the server is about to end; streams of events end then, which would hold it up.
        actions: What the page may do; None for a page that only reads, which then has no other routes.
    """
    routes = [_file_route(path, *file) for path, file in page_files().items()]
    routes += Answers(reading, is_ending, may_act=actions is not None).routes()
    if actions is not None:
        routes += action_routes(actions, reading)
    rules = Rules(names=names, key=key, is_open=_is_open, render=_render)
    return Guard(Starlette(routes=routes, exception_handlers={HTTPException: _refused}), rules)


class Answers:
    """What the page asks for."""

    def __init__(
        self, reading: Reading, is_ending: Callable[[], bool] = lambda: False, *, may_act: bool = False
    ) -> None:
        self._reading = reading
        self._may_act = may_act
        self._is_ending = is_ending

    def routes(self) -> list[Route]:
        """Return the routes, all of them for GET and HEAD only."""
        run = "/api/runs/{run}"
        paths: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
            ("/api/about", self._about),
            ("/api/runs", self._in_thread(lambda _: self._reading.catalogue.as_json())),
            (run, self._in_thread(lambda request: self._reading.facts(_run(request)))),
            (f"{run}/numbers", self._in_thread(lambda request: self._reading.live(_run(request)).names())),
            (f"{run}/series", self._in_thread(self._series)),
            (f"{run}/steps", self._in_thread(self._steps)),
            (f"{run}/waits", self._in_thread(lambda request: self._reading.waits(_run(request)))),
            (f"{run}/cluster", self._in_thread(lambda request: self._reading.picture(_run(request)))),
            (f"{run}/serving", self._in_thread(lambda request: self._reading.serving(_run(request)))),
            (f"{run}/logs", self._in_thread(self._logs)),
            (f"{run}/differences", self._in_thread(self._differences)),
            (f"{run}/events", self._events),
            ("/api/explain/{code}", self._in_thread(_explain)),
        ]
        return [Route(path, answer, methods=["GET"]) for path, answer in paths]

    async def _about(self, _: Request) -> Response:
        runs = str(self._reading.catalogue.runs_folder)
        return _Json({"version": __version__, "runs": runs, "may_act": self._may_act})

    def _in_thread(self, read: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that reads files in a thread, so that a slow disk holds up nobody else."""

        async def answer(request: Request) -> Response:
            try:
                return _Json(await run_in_threadpool(read, request))
            except UnknownRunError as error:
                raise HTTPException(404, str(error)) from None
            except (OSError, ValueError) as error:
                raise HTTPException(422, f"the run cannot be read: {_why(error)}") from None

        return answer

    def _series(self, request: Request) -> dict[str, Any]:
        query = request.query_params
        first, last = _whole(query.get("from")), _whole(query.get("to"))
        most = _whole(query.get("points")) or MOST_POINTS
        return self._reading.live(_run(request)).series(query.get("name", ""), first=first, last=last, most=most)

    def _steps(self, request: Request) -> dict[str, Any]:
        return self._reading.steps(_run(request), most=_whole(request.query_params.get("last")) or 12)

    def _logs(self, request: Request) -> dict[str, Any]:
        query = request.query_params
        return self._reading.logs(
            _run(request),
            query={name: query[name] for name in query},
            most=min(_MOST_ROWS, _whole(query.get("lines")) or 200),
        )

    def _differences(self, request: Request) -> dict[str, Any]:
        return self._reading.differences(_run(request), request.query_params.get("from", ""))

    async def _events(self, request: Request) -> Response:
        """Stream what changes in a run; a reader that comes back names the last event that it has, and gets what came later."""
        try:
            live = await run_in_threadpool(self._reading.live, _run(request))
        except UnknownRunError as error:
            raise HTTPException(404, str(error)) from None
        except (OSError, ValueError) as error:
            raise HTTPException(422, f"the run cannot be read: {_why(error)}") from None
        token, _, last = request.headers.get("last-event-id", "").partition("-")
        known = int(last) if last.isascii() and last.isdecimal() and len(last) < 16 else -1  # noqa: PLR2004 - no longer number was given out

        async def events() -> AsyncIterator[str]:
            nonlocal live, token, known
            quiet = 0.0
            yield "retry: 500\n\n"
            while not self._is_ending():
                for change in live.since(token, known):
                    quiet, known, token = 0.0, change.number, live.token
                    yield _event(f"{token}-{known}", change.kind, dict(change.content))
                await asyncio.sleep(_POLL_S)
                quiet += _POLL_S
                if quiet >= _ALIVE_S:
                    quiet = 0.0
                    yield ": still there\n\n"
                await run_in_threadpool(live.poll, every_s=0.75 * _POLL_S)
                if live.is_replaced:
                    try:
                        live = await run_in_threadpool(self._reading.live, _run(request))
                    except (UnknownRunError, OSError, ValueError):
                        return  # who asks again is told why

        return StreamingResponse(events(), media_type="text/event-stream")


def action_routes(actions: "Actions", reading: Reading) -> list[Route]:
    """Return the routes by which runs are launched, stopped and resumed; they exist only on a page that may do so.

    A browser sends the header with the key for no page but ours, so no other site can ask for an action.
    """

    def stop(request: Request, order: dict[str, Any]) -> dict[str, Any]:
        actions.stop(reading.path_of(_run(request)), now=order.get("now") is True)
        return {}

    run = "/api/runs/{run}"
    return [
        Route("/api/actions", _act(lambda _request, _order: actions.choices()), methods=["GET"]),
        Route("/api/actions/launch", _act(lambda _, order: {"run": actions.launch(order)}), methods=["POST"]),
        Route(f"{run}/stop", _act(stop), methods=["POST"]),
        Route(
            f"{run}/resume",
            _act(lambda request, _: {"run": actions.resume(reading.path_of(_run(request)))}),
            methods=["POST"],
        ),
    ]


def _act(do: Callable[[Request, dict[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that does what is ordered in a thread, or says why nothing was done as the command line would."""

    async def answer(request: Request) -> Response:
        try:
            order = json.loads(await request.body() or b"{}")
            if not isinstance(order, dict):
                raise HTTPException(422, "the order is no object")
            return _Json(await run_in_threadpool(do, request, order))
        except UnknownRunError as error:
            raise HTTPException(404, str(error)) from None
        except (ValueError, RecursionError):
            raise HTTPException(422, "the order is no JSON") from None
        except LaunchError as error:
            found = [
                {"code": one.code, "severity": str(one.severity), "text": render([one])} for one in error.diagnostics
            ]
            return _Json({"error": error.diagnostics[0].message, "diagnostics": found}, 422)
        except OSError as error:
            raise HTTPException(422, f"nothing was done: {system_reason(error)}") from None

    return answer


def _why(error: OSError | ValueError) -> str:
    """Say why a run cannot be read, with the name of the file and without its folder."""
    if not isinstance(error, OSError):
        return str(error)
    named = f"{Path(os.fsdecode(error.filename)).name}: " if isinstance(error.filename, str | bytes | Path) else ""
    return f"{named}{system_reason(error)}"


def _event(number: str, kind: str, content: dict[str, Any]) -> str:
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(content)}\n\n"


def _run(request: Request) -> str:
    run: str = request.path_params["run"]
    return run


def _whole(text: str | None) -> int | None:
    """Read a whole number of a query; None for anything else."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 16 else None  # noqa: PLR2004 - 2^53 has 16 digits


def _explain(request: Request) -> dict[str, Any]:
    page = load_page(str(request.path_params["code"]).upper())
    if page is None:
        raise HTTPException(404, "there is no such code")
    return {"code": page.code, "title": page.title, "text": page.text}


def _is_open(scope: Scope) -> bool:
    """The page's own files hold nothing of any run, so they can be read without the key, which the page then sends."""
    path: str = scope["path"]
    return scope["method"] in {"GET", "HEAD"} and (path == "/" or path.startswith("/page/"))


def _file_route(path: str, content: bytes, media_type: str) -> Route:
    headers = {"cache-control": "no-cache", "content-security-policy": CONTENT_SECURITY_POLICY}

    async def answer(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, answer, methods=["GET"])


def _render(_: str, refusal: Refusal) -> dict[str, Any]:
    return {"error": refusal.message, "code": refusal.code}


class _Json(JSONResponse):
    """An answer in which half a character, such as the name of a folder that is no UTF-8 has, becomes `?`, so that one run hides no others."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - starlette asks this for no other
    return _Json({"error": error.detail}, error.status_code, error.headers)
