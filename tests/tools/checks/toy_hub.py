"""A model hub on this machine with one repository, over HTTP as huggingface_hub expects it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


@contextmanager
def serving(repository: str, commit: str, folder: Path) -> Iterator[str]:
    """Serve the files of a folder as one commit; yield the hub's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            api = f"/api/models/{repository}"
            if path.startswith(f"{api}/tree/"):
                self._answer(json.dumps(list(map(entry, files(folder)))).encode())
            elif path in (api, f"{api}/revision/main"):
                self._answer(json.dumps({"id": repository, "sha": commit}).encode())
            elif path.startswith(f"/{repository}/resolve/"):
                self._answer((folder / path.rpartition("/")[2]).read_bytes())
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{sha1(body).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_file())


def entry(path: Path) -> dict[str, object]:
    """Return a file as the hub lists it."""
    oid = sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": oid}
