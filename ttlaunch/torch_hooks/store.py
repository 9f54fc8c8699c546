"""Has the store of `torch.distributed` in rank 0 listen on MASTER_ADDR alone; torch lets it listen on all interfaces.

Whoever reaches the store can read and change what ranks exchange through it, and it asks nobody for a key.
"""

from __future__ import annotations

import functools
import inspect
import socket

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_BACKLOG = 2048  # as many as torch asks for; the kernel may allow fewer


def bind_store(rendezvous: ModuleType) -> None:
    """Wrap the function of `torch.distributed.rendezvous` that makes the store of `env://` and `tcp://`."""
    create = rendezvous._create_c10d_store  # noqa: SLF001
    parameters = inspect.signature(create)

    @functools.wraps(create)
    def on_one_address(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        serves = call["rank"] == 0 and not rendezvous._torchelastic_use_agent_store()  # noqa: SLF001
        descriptor = _listen(call["hostname"], call["port"]) if serves and call["port"] else None
        # If the port is taken by this process, the store shares the server that is there; otherwise torch says why it cannot serve.
        if descriptor is None:
            return create(*args, **kwargs)
        return rendezvous.TCPStore(
            host_name=call["hostname"],
            port=call["port"],
            world_size=call["world_size"],
            is_master=True,
            timeout=call["timeout"],
            multi_tenant=True,
            master_listen_fd=descriptor,  # which the store closes
            use_libuv=call.get("use_libuv", True),
        )

    rendezvous._create_c10d_store = on_one_address  # type: ignore[attr-defined] # noqa: SLF001


def _listen(host: str, port: int) -> int | None:
    """Return the descriptor of a socket that listens on one address; None if it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError:
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener.detach()
