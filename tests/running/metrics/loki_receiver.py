"""A receiver that does what Loki's documentation says of `push` and `query_range`, and fails in the ways that a test asks for."""

import http.server
import json
import re
import threading
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

SELECTOR = re.compile(r'\{(?P<labels>[a-z]+="[^"]*"(?:,\s*[a-z]+="[^"]*")*)\}\s*(?:\|= "(?P<contained>[^"]*)")?')
LONGEST_LINE = 256 * 1024
DROP = "drop"
"""Take what is pushed and close the connection without an answer."""


class LokiReceiver:
    """What it has, by stream; two entries of a stream with the same time and text are one."""

    def __init__(self):
        self.streams = {}
        self._known = set()
        self.answers = []  # of the next requests, before all others are taken: a status, (status, text, headers) or DROP
        self.requests = []  # path, headers and body of each
        self.takes_metadata = True
        self.address = None

    def push(self, body):
        for stream in json.loads(body)["streams"]:
            assert {"job", "host", "level"} == set(stream["stream"])
            labels = tuple(sorted(stream["stream"].items()))
            kept = self.streams.setdefault(labels, [])
            for time, line, *metadata in stream["values"]:
                assert re.fullmatch(r"\d{1,19}", time)
                assert len(line.encode()) <= LONGEST_LINE
                assert all(isinstance(value, str) for one in metadata for value in one.values())
                if metadata and not self.takes_metadata:
                    return 400, "structured metadata is disallowed by limits"
                if (labels, time, line) not in self._known:
                    self._known.add((labels, time, line))
                    kept.append((time, line, *metadata))
        return 204, ""

    def query(self, text):
        """The lines of `{label="value"} |= "text"`, in the order of their times."""
        found = SELECTOR.fullmatch(text)
        wanted = set(re.findall(r'([a-z]+)="([^"]*)"', found["labels"]))
        entries = [one for labels, kept in self.streams.items() if wanted <= set(labels) for one in kept]
        return [one for one in sorted(entries, key=lambda one: int(one[0])) if (found["contained"] or "") in one[1]]

    def lines(self, text):
        return [one[1] for one in self.query(text)]


@contextmanager
def running():
    """A receiver on a free port of this machine."""
    loki = LokiReceiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, status, text="", headers=()):
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            loki.requests.append((self.path, dict(self.headers), body))
            answer = loki.answers.pop(0) if loki.answers else None
            if answer == DROP:
                loki.push(body)
                self.close_connection = True
            elif answer is None:
                self.reply(*loki.push(body))
            else:
                self.reply(*(answer if isinstance(answer, tuple) else (answer, "no")))

        def do_GET(self):
            url = urlsplit(self.path)
            query = parse_qs(url.query)["query"][0]
            values = [one[:2] for one in loki.query(query)]
            content = {
                "status": "success",
                "data": {"resultType": "streams", "result": [{"stream": {}, "values": values}]},
            }
            self.reply(200, json.dumps(content))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    loki.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield loki
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
