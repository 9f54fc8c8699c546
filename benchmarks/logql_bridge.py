"""Answer as ClickHouse does over HTTP, with chdb in this process, so that qryn has a database without a server.

    python benchmarks/logql_bridge.py PORT FOLDER

Only for `benchmarks/logql.py`: one request at a time, on this machine.
"""

import gzip
import http.server
import sys
import threading
import urllib.parse

from chdb import session


class Handler(http.server.BaseHTTPRequestHandler):
    """One statement a request."""

    protocol_version = "HTTP/1.1"
    session: session.Session
    lock = threading.Lock()

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body, url = self._body(), urllib.parse.urlparse(self.path)
        asked = urllib.parse.parse_qs(url.query)
        if url.path == "/ping":
            self._reply(200, b"Ok.\n")
            return
        statement = "\n".join([asked.get("query", [""])[0], body.decode("utf-8", "replace")]).strip()
        try:
            with self.lock:
                if "database" in asked and not statement.upper().startswith("CREATE DATABASE"):
                    self.session.query(f"USE {asked['database'][0]}")
                self._reply(200, self.session.query(statement, "TabSeparated").bytes() or b"")
        except RuntimeError as error:
            self._reply(500, str(error).encode())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(parts)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-ClickHouse-Format", "TabSeparated")
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    Handler.session = session.Session(sys.argv[2])
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
