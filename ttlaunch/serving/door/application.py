"""The application of the door: all its routes behind the guard, on the API's port and on the page's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ttlaunch.serving.door import answers
from ttlaunch.serving.door.answers import AnswerError
from ttlaunch.serving.door.chat_api import ChatApi, Ports
from ttlaunch.serving.door.link import Link
from ttlaunch.serving.door.metrics import Meters
from ttlaunch.serving.door.openai_api import OpenAiApi
from ttlaunch.web.guard import Guard, Refusal, Rules

SERVICE: Final = "ttlaunch serve"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user decides about the door."""

    ports: Ports
    names: frozenset[str]
    key: str | None = None
    private_receipts: bool = False
    page: Sequence[BaseRoute] = ()


class ByPort:
    """One application for each of two ports: the page's has the page at `/`, beside the same routes."""

    def __init__(self, api: ASGIApp, page: ASGIApp, *, page_port: int | None) -> None:
        self._api = api
        self._page = page
        self._page_port = page_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the application of the port that the request came to."""
        on_page = scope["type"] == "http" and scope["server"][1] == self._page_port
        await (self._page if on_page else self._api)(scope, receive, send)


def make_application(link: Link, *, meters: Meters, settings: Settings) -> ASGIApp:
    """Make the door's application."""
    api = ChatApi(link, meters=meters, ports=settings.ports, private_receipts=settings.private_receipts).routes()
    api += OpenAiApi(link).routes()
    ports = ByPort(
        _application([Route("/", _status), *api]),
        _application([*settings.page, *api]),
        page_port=settings.ports.page,
    )
    rules = Rules(names=settings.names, key=settings.key, is_open=_is_open(settings.ports.page), render=_render)
    return Guard(ports, rules)


def _application(routes: Sequence[BaseRoute]) -> Starlette:
    return Starlette(routes=routes, exception_handlers={AnswerError: answers.answer_error, HTTPException: _no_route})


async def _status(_: Request) -> Response:
    return JSONResponse({"status": "ok", "service": SERVICE})


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - starlette asks this for no other
    found = AnswerError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code="no_route")
    told = answers.render_error(request.url.path, found)
    return JSONResponse(told, error.status_code, dict(error.headers or {}))


def _render(path: str, refusal: Refusal) -> dict[str, Any]:
    return answers.render_error(path, AnswerError(refusal.status, refusal.message, code=refusal.code))


def _is_open(page_port: int | None) -> Any:
    """The page's own files hold nothing of the run: they can be read without the key, which the page then asks for."""

    def is_open(scope: Scope) -> bool:
        path: str = scope["path"]
        files = path == "/" or path.startswith("/page/")
        return scope["method"] in {"GET", "HEAD"} and scope["server"][1] == page_port and files

    return is_open
