"""Bug 25: whoever reaches the port, on any network, runs code of their choice: what comes is unpickled."""

import pickle  # the bug
import socket


def serve(port):
    with socket.create_server(("0.0.0.0", port)) as listener:  # the bug, too
        connection, _ = listener.accept()
        return pickle.loads(connection.recv(1 << 20))
