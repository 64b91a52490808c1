"""A server that answers only a hub's catalogue."""

import contextlib
import http.server
import json
import threading
from collections.abc import Generator
from dataclasses import asdict

from scheduler.curriculum.catalogue import HubCatalogue


@contextlib.contextmanager
def serve_catalogue(catalogue: HubCatalogue) -> Generator[str]:
    """Yield the address of a hub that serves only a catalogue."""
    body = {
        env: {"subsets": {name: asdict(entry) for name, entry in subsets.items()}}
        for env, subsets in catalogue.envs.items()
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Write no log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
