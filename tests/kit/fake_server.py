"""A server on loopback that answers chat completions as a test says, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""Status, and a body: bytes as they are, anything else as JSON."""
Behave = Callable[[dict[str, Any], int], Reply]
"""Given the request's body and its number from 0, what to answer."""


def said(text: str, finish: str = "stop", **message: Any) -> Reply:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text} | message, "finish_reason": finish}
    return 200, {"object": "chat.completion", "choices": [choice]}


class FakeServer:
    """What the server was asked, in order, and where it is."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.lock = threading.Lock()


@contextmanager
def serve(behave: Behave) -> Iterator[FakeServer]:
    """Run it on a free port of loopback until the block ends."""
    server = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 - http.server's name
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                number = len(server.asked)
                server.asked.append(body)
                server.paths.append(self.path)
                server.headers.append(dict(self.headers))
            status, answer = behave(body, number)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(ConnectionError):  # whoever asked has lost patience
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
