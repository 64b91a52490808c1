"""The command `dashboard`: a read-only page over runs and conversation files."""

import contextlib
import logging
import os
import secrets
import socket
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.host.loopback import family_of, loopback
from common.repository import ROOT
from common.wire.addresses import is_loopback
from tools.cli.command_line import ParsedCommand
from tools.dashboard.reading.index_cache import cache_folder
from tools.dashboard.reading.sources import Sources

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from tools.dashboard.interactive import InteractiveEpisodes

USAGE = "dashboard [RUN|FILE ...] [port=N] [host=H] [token=T]"
OPTIONS = ("port", "host", "token", "run.dir", "fd", "metrics_token_file")
PORT = 8600
PORTS_TRIED = 20  # Number of ports to try from the default on, if none is requested.
BESIDE_NICE = 10  # Niceness beside a run, which has priority.


def dashboard(request: ParsedCommand) -> int:
    """Serve until interrupted; return the exit code.

    Raises: ConfigError: a run or a file is missing, or the port is unusable; names it.
    """
    from tools.dashboard.interactive import InteractiveEpisodes

    words = [word for word in request.overrides if "=" not in word]
    options = dict(word.split("=", 1) for word in request.overrides if "=" in word)
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise ConfigError(f"{unknown[0]}: unknown option. Usage: run.py {USAGE}")
    host = options.get("host", loopback())
    runs = ROOT / options.get("run.dir", "runs")
    sources = Sources(words, runs=runs, cache=cache_folder())
    token = options.get("token") or ("" if is_loopback(host) else secrets.token_urlsafe(24))
    if "fd" in options:  # The launcher has bound this socket and printed its address.
        os.nice(BESIDE_NICE)
        listener = socket.socket(fileno=int(options["fd"]))
        if "metrics_token_file" in options:
            path = Path(options["metrics_token_file"])
            serve_metrics(listener, sources, token=path.read_text(encoding="utf-8").strip())
            return 0
    else:
        listener = listen(host, options.get("port", ""))
        print(url_of(listener, token))
    serve(listener, sources, host=host, token=token, table=InteractiveEpisodes())
    return 0


def url_of(listener: socket.socket, token: str) -> str:
    """Return the address to open, with the token if one is needed."""
    host, port = listener.getsockname()[:2]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def listen(host: str, wanted: str, *, keys: tuple[str, str] = ("host", "port")) -> socket.socket:
    """Return a socket on the wanted port; "" is the first free one from `PORT` on, "0" is any.

    Args:
        keys: names of the options for the host and the port, for an error.

    Raises: ConfigError: the port is no number, or is taken.
    """
    if wanted and not (wanted.isascii() and wanted.isdigit() and int(wanted) < 65536):
        raise ConfigError(f"port={wanted}: expects a number from 0 to 65535")
    family = family_of(host)
    ports = [int(wanted)] if wanted else [*range(PORT, PORT + PORTS_TRIED), 0]
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            if port == ports[-1]:
                where = f"{keys[0]}={host} {keys[1]}={port}"
                problem = f"no server can listen there ({error.strerror})"
                raise ConfigError(f"{where}: {problem}. Use another.") from error
            continue
        listener.listen(64)
        return listener
    raise AssertionError


def serve(
    listener: socket.socket,
    sources: Sources,
    *,
    host: str,
    token: str,
    table: "InteractiveEpisodes",
) -> None:
    """Answer requests until a signal ends the server."""
    from tools.dashboard.reading.sources import SourceRefresher
    from tools.dashboard.web.app import PLAY_PATH, AccessMiddleware, make_app

    watch = SourceRefresher(sources)
    watch.start()
    app = make_app(watch, AccessMiddleware(host=host, token=token, writable=PLAY_PATH), table)
    app.router.on_shutdown.append(table.shut_down)
    try:
        _run_server(app, listener)
    finally:
        watch.stop()


def serve_metrics(listener: socket.socket, sources: Sources, *, token: str) -> None:
    """Answer scrapes of the page `/metrics` until a signal ends the server."""
    from tools.dashboard.prometheus import make_metrics_app

    _run_server(make_metrics_app(sources.run_folders, token=token), listener)


def server_config(app: "FastAPI") -> "uvicorn.Config":
    """Return the configuration of a server, with limits on silent and slow connections."""
    import uvicorn

    from common.http.serving import Refusals, limited_protocol

    return uvicorn.Config(
        app,
        http=limited_protocol(Counter(), Refusals()),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        lifespan="on",
    )


def _run_server(app: "FastAPI", listener: socket.socket) -> None:
    """Serve an application at a socket until a signal ends the server; close the socket."""
    import uvicorn

    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(server_config(app)).run(sockets=[listener])
    finally:
        listener.close()
