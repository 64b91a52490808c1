"""The envhub role: builds the hub and serves it until told to stop."""

import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from common.config import RunConfig
from common.run_dir import RunDir
from common.security import create_keys
from envhub.registry import Registry, missing_requirements
from envhub.server import make_app
from envhub.sessions import Sessions

logger = logging.getLogger(__name__)

GRACEFUL_STOP_S = 2
KEEP_ALIVE_S = 75


def run(cfg: RunConfig, run_dir: RunDir) -> None:
    """Serves the environments of the run's tasks and tells the other roles where."""
    envs = sorted({task.env for task in cfg.tasks})
    token = create_keys(run_dir.keys).hub_token
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((cfg.envhub.host, cfg.envhub.port or _previous_port(run_dir)))
        port = listener.getsockname()[1]
        run_dir.publish_address("envhub", f"http://{cfg.envhub.host}:{port}")
        serve(
            envs=envs,
            host=cfg.envhub.host,
            port=port,
            token=token,
            lease_s=cfg.envhub.session_lease_s,
            capacity=cfg.envhub.capacity,
            step_timeout_s=cfg.envhub.step_timeout_s,
            log_level=cfg.log.level,
            listener=listener,
        )


def _previous_port(run_dir: RunDir) -> int:
    """Returns the port of a hub that this one replaces, since its clients look there; else 0."""
    path = run_dir.addresses / "envhub"
    return int(path.read_text().rpartition(":")[2]) if path.exists() else 0


def serve(
    *,
    envs: list[str],
    host: str,
    port: int,
    token: str | None,
    lease_s: float,
    capacity: int,
    step_timeout_s: float,
    log_level: str = "info",
    listener: socket.socket | None = None,
) -> None:
    """Serves the hub until SIGTERM or SIGINT, then stops within `GRACEFUL_STOP_S`.

    Args:
        envs: names to offer.
        host: address to bind; other than loopback it needs a token.
        port: TCP port.
        token: bearer token of every route but /healthz; None asks for none.
        lease_s: seconds an unused session lives.
        capacity: sessions per environment.
        step_timeout_s: longest a call into an environment may take.
        log_level: of the server, in lower case.
        listener: a bound socket to serve on instead of binding `port`.

    Raises:
        ValueError: an open address without a token, an unknown environment or a missing program.
    """
    app = build(
        envs=envs,
        host=host,
        token=token,
        lease_s=lease_s,
        capacity=capacity,
        step_timeout_s=step_timeout_s,
    )
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_STOP_S,
        log_level=log_level.lower(),
        log_config=None,
    )
    logger.info("hub starting envs=%s host=%s port=%d", ",".join(envs), host, port)
    with _signals_end_quietly():
        uvicorn.Server(config).run(sockets=[listener] if listener else None)
    logger.info("hub stopped")


@contextlib.contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Makes a stop by signal an ordinary return.

    uvicorn stops on SIGTERM and SIGINT and then raises the signal once more for the handler that
    was there before, which by default would end the process with a failure code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stops = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, lambda *_: None) for number in stops]
    try:
        yield
    finally:
        for number, handler in zip(stops, previous, strict=True):
            signal.signal(number, handler)


def build(
    *,
    envs: list[str],
    host: str,
    token: str | None,
    lease_s: float,
    capacity: int,
    step_timeout_s: float,
) -> FastAPI:
    """Returns the application `serve` runs; refuses what `serve` refuses."""
    if token is None and not _is_loopback(host):
        raise ValueError(f"host {host!r} is open to others: set a token, or bind 127.0.0.1")
    if token is not None and not token.strip():
        raise ValueError("the token is empty")
    missing = missing_requirements(envs)
    if missing:
        raise ValueError("; ".join(missing))
    registry = Registry(envs)
    for name in envs:
        registry.spec(name)  # a module that cannot be imported stops the start, not an episode
    sessions = Sessions(registry, lease_s=lease_s, capacity=capacity, step_timeout_s=step_timeout_s)
    return make_app(sessions, registry, token=token, step_timeout_s=step_timeout_s)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
