"""Open the page: its port and key are decided and checked before anything is served."""

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ttlaunch.diagnostics import LaunchError, shown, usage_mistake
from ttlaunch.system_reason import system_reason
from ttlaunch.web.addresses import LOOPBACK, draw_key, listen

HOST: Final = "127.0.0.1"
_LIBRARIES = ("starlette", "uvicorn")
_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class OpenedDashboard:
    """A page whose port listens already; `serve` answers until it is interrupted.

    Attributes:
        may_act: Whether runs can be launched, stopped and resumed there.
        recipes: A folder whose recipes can be launched, besides those that are built in.
        link: The address with the key, in the part that a browser sends to no server.
    """

    runs_folder: Path
    listening: socket.socket
    key: str
    may_act: bool = False
    recipes: Path | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.listening.getsockname()[1]}/"

    @property
    def link(self) -> str:
        return f"{self.url}#key={self.key}"

    def serve(self) -> None:
        """Answer until Ctrl-C or SIGTERM."""
        from ttlaunch.dashboard.application import make_application  # noqa: PLC0415 - needs the extra's libraries
        from ttlaunch.dashboard.cache import find_cache  # noqa: PLC0415 - as below
        from ttlaunch.dashboard.reading import Reading  # noqa: PLC0415 - only once the port is ours
        from ttlaunch.web.server import make_server  # noqa: PLC0415 - as above

        def is_ending() -> bool:
            return server.should_exit

        reading = Reading(self.runs_folder, find_cache(os.environ))
        actions = None
        if self.may_act:
            from ttlaunch.dashboard.actions import Actions  # noqa: PLC0415 - imports all that starts runs

            actions = Actions(self.runs_folder, self.recipes)
        application = make_application(reading, names=LOOPBACK, key=self.key, is_ending=is_ending, actions=actions)
        server = make_server(application)
        with self.listening, contextlib.suppress(KeyboardInterrupt), contextlib.closing(reading):
            asyncio.run(server.serve(sockets=[self.listening]))


def open_dashboard(
    runs_folder: Path, *, port: int, may_act: bool = False, recipes: Path | None = None
) -> OpenedDashboard:
    """Check what the page needs, and listen.

    Args:
        runs_folder: The folder of the runs.
        port: The port; 0 for any free one.
        may_act: Whether runs can be launched, stopped and resumed there.
        recipes: A folder whose recipes can be launched, besides those that are built in.

    Raises:
        LaunchError: A library is missing, the folder is none, or the port is taken.
    """
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        hint = "`pip install 'ttlaunch[dashboard]'`"
        raise LaunchError([usage_mistake(f"`ttlaunch dashboard` needs the library `{missing[0]}`", hint)])
    folder = Path.cwd() / runs_folder
    if folder.exists() and not folder.is_dir():
        message = f"`--runs-dir {shown(runs_folder)}` is not a folder"
        raise LaunchError([usage_mistake(message, "name the folder that holds the run folders")])
    if recipes is not None and not (Path.cwd() / recipes).is_dir():
        message = f"`--actions-from {shown(recipes)}` is not a folder"
        raise LaunchError([usage_mistake(message, "name a folder whose folders are recipes")])
    try:
        listening = listen(HOST, port)
    except OSError as error:
        free = "0" if port == 0 else str(port + 1 if port < _HIGHEST_PORT else port - 1)
        message = f"nothing can listen on port {port}: {system_reason(error)}"
        hint = f"`--port {free}`, or `--port 0` for any free port"
        raise LaunchError([usage_mistake(message, hint)]) from error
    return OpenedDashboard(folder, listening, draw_key(), may_act, recipes and Path.cwd() / recipes)
