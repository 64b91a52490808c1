"""A hub of one route, served by the standard library."""

import contextlib
import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator

from tests.learner.scheduler.builders import CATALOGUE


class _Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = {
            env: {"subsets": {name: dataclasses.asdict(entry) for name, entry in subsets.items()}}
            for env, subsets in CATALOGUE.envs.items()
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@contextlib.contextmanager
def run_hub() -> Iterator[str]:
    """Serve the builders' catalogue; yields the address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
