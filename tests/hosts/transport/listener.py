"""A port on which something answers that is no sshd."""

import socket
import threading
from contextlib import contextmanager


@contextmanager
def listener(answer):
    """A port whose connections are handed to `answer`, one thread each."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def accept():
            while not stop.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        def serve(connection):
            with connection:
                answer(connection, stop)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        stop.set()
        thread.join(5)


def keep_open(_connection, stop):
    stop.wait(30)
