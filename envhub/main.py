"""The envhub role: builds the hub and serves it until a stop signal.

A run's hub reports its address to the scheduler periodically.
"""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import secrets
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType

import uvicorn
import zmq
from fastapi import FastAPI

from common.config.env import RemoteOptions
from common.config.envhub import EnvhubSection
from common.config.envs import EnvsSection
from common.config.run_config import RunConfig
from common.cpu import family_cpu_s
from common.errors import ConfigError, LongstrideError
from common.formats.action_size import FIELDS_BYTES, MIB
from common.http.serving import QuietSocket, limited_protocol
from common.join.enrol import Joined
from common.memory import resident_bytes
from common.stall.beacon import beacon_of
from common.store.run_dir import RunDir
from common.wire.addresses import AddressBook, Addresses, advertised, node_name, with_host
from common.wire.messages import OWN_HUB, HubGoodbye, HubHello, HubNoted, HubPlace, HubUse, Rejected
from common.wire.security import RunKeys, own_keys
from common.wire.sockets import FollowingDealer
from envhub.catalogue.content import changed_content, contents_of, digests_of, record_content
from envhub.catalogue.registry import Registry, missing_requirements
from envhub.errors import UnknownEnv
from envhub.hosting.sessions import Sessions
from envhub.http.parts import AgentGymLimits
from envhub.http.routes import make_app

logger = logging.getLogger(__name__)


CONNECT_S = 1.0  # Timeout of a connection to a known address.
# Seconds between two measurements of memory and CPU, which read the state of each process.
MEASURE_S = 5.0


class Registration(threading.Thread):
    """Sends a hello every `every_s` and follows a scheduler that changes its address.

    Consumes: the scheduler's answers.
    Waits for: the scheduler's address, and its answers, `silence_s` at most.
    Unblocked by: the address, the answers, and `stop`.

    A failure, or the end of the run, ends the hub by a signal to this process; the failure is in
    `error`. If `silence_s` is None, another process ends the hub, and the thread waits for a
    scheduler as long as the hub serves.
    """

    def __init__(
        self,
        addresses: Addresses,
        keys: RunKeys,
        hello: HubHello,
        *,
        every_s: float,
        silence_s: float | None,
        refused: Callable[[], dict[str, int]] = dict,
        sessions: Callable[[], tuple[int, int]] = lambda: (0, 0),
        paused: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """Prepare the thread.

        Args:
            sessions: returns the numbers of live and of possible sessions.
            paused: returns the environments that wait for a service, with the reasons.
        """
        super().__init__(name="registration", daemon=True)
        self._addresses = addresses
        self._hello = hello
        self._every_s = every_s
        self._silence_s = silence_s
        self._refused = refused
        self._sessions = sessions
        self._paused = paused
        self._use = HubUse()
        self._measure_at = 0.0
        self._context = zmq.Context()
        self._dealer = FollowingDealer(addresses, "scheduler", keys, context=self._context)
        self._stop_requested = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Register until the run ends or `stop` is called."""
        try:
            while self._addresses.find_address("scheduler") is None:
                if self._stop_requested.wait(self._every_s):
                    return
            self._dealer.connect(timeout_s=CONNECT_S)
            while not self._is_over():
                self._dealer.follow()
                self._dealer.send(self._current_hello())
                self._stop_requested.wait(self._every_s)
            hello = self._hello
            self._dealer.send(HubGoodbye(name=hello.name, incarnation=hello.incarnation))
        except LongstrideError as error:
            self.error = error
        finally:
            self._dealer.close(linger_s=0.5)
            self._context.term()
        if not self._stop_requested.is_set() and self._silence_s is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _current_hello(self) -> HubHello:
        """Return the hello with the hub's current address, use and refusals."""
        place = self._hello.place
        url = advertised(place.url, towards=self._dealer.address)
        num, most = self._sessions()
        use = replace(self._used(), num_sessions=num, max_sessions=most)
        message = replace(self._hello, node=node_name(self._dealer.address), use=use)
        place = replace(place, url=url)
        return replace(message, place=place, refused=self._refused(), paused=self._paused())

    def _used(self) -> HubUse:
        """Return memory and CPU in use, as last measured."""
        if time.monotonic() >= self._measure_at:
            self._measure_at, pid = time.monotonic() + MEASURE_S, os.getpid()
            self._use = HubUse(rss_bytes=resident_bytes([pid])[pid], cpu_s=family_cpu_s())
        return self._use

    def _is_over(self) -> bool:
        """Return whether to end. Raises: LongstrideError: refused, or silence for too long."""
        for message in self._dealer.take_all():
            if isinstance(message, Rejected):
                raise LongstrideError(f"the scheduler refused this hub: {message.reason}")
            if isinstance(message, HubNoted) and message.is_finished:
                logger.info("the run has ended")
                return True
        if self._silence_s is not None and self._dealer.silent_s > self._silence_s:
            silent_s = self._dealer.silent_s
            where = self._dealer.address
            raise LongstrideError(f"no message from the scheduler at {where} for {silent_s:.0f} s")
        return self._stop_requested.is_set()

    def stop(self, *, timeout_s: float) -> None:
        """Send a goodbye, so that no more episodes are assigned to this hub, and end the thread."""
        self._stop_requested.set()
        self.join(timeout_s)


DRAIN_S = 2.0
GRACEFUL_STOP_S = 1
GOODBYE_S = 1.0
KEEP_ALIVE_S = 75
BACKLOG = 4096


def run(cfg: RunConfig, run_dir: RunDir) -> None:
    """Serve the environments of the run's tasks; publish the address to the other roles."""
    keys = own_keys(run_dir.keys, role="envhub", name="envhub")
    port = cfg.envhub.port or _previous_port(run_dir)
    token = keys.hub_token
    try:
        options = replace(_with_facts(cfg), run_dir=cfg.envs.run_dir or str(run_dir.root))
        app, sessions = build(
            envs_of_run(cfg), cfg.envhub, token=token, options=options, remote=cfg.env
        )
    except (ValueError, UnknownEnv) as error:
        raise ConfigError(f"envhub: {error}") from error
    contents = contents_of(sessions.registry)
    if changes := changed_content(run_dir.root, contents):
        raise ConfigError(f"envhub: {'; '.join(changes)}")
    record_content(run_dir.root, contents)
    with _listener(cfg.envhub.host, port) as listener:
        run_dir.publish_address("envhub", address_of(listener))
        place = HubPlace(url=public_address(cfg, listener), token=token, envs=sessions.env_names)
        hello = first_hello(OWN_HUB, place, sessions.registry)
        start_s = cfg.actor.start_timeout_s
        with (
            registered(cfg, run_dir, keys, hello, serving=(app, sessions)),
            beacon_of(run_dir, "envhub", start_s=start_s) as beacon,
        ):
            on_round = partial(beacon.note, "main", "serving")
            serve(app, sessions, listener, log_level=cfg.log.level, on_round=on_round)


def run_joined(cfg: RunConfig, joined: Joined) -> None:
    """Serve a run on another machine: all its environments, or those of `envhub.envs`.

    Raises:
        ConfigError: a requirement of an environment is missing here, or the address is in use.
        LongstrideError: the scheduler refused this hub, such as for other data, or stopped
            answering.
    """
    names = cfg.envhub.envs or envs_of_run(cfg)
    token = cfg.envhub.token or secrets.token_urlsafe(32)
    name = joined.key.name
    book = AddressBook(lambda: joined.address)
    try:
        app, sessions = build(
            names, cfg.envhub, token=token, options=_with_facts(cfg), remote=cfg.env
        )
        listener = _listener(cfg.envhub.host, cfg.envhub.port)
    except (OSError, ValueError, UnknownEnv) as error:
        raise ConfigError(f"envhub: {error}") from error
    with listener:
        place = HubPlace(url=public_address(cfg, listener), token=token, envs=sessions.env_names)
        hello = first_hello(name, place, sessions.registry)
        silence_s = 4 * cfg.scheduler.dead_after_s
        run_keys = joined.key.as_keys()
        serving = (app, sessions)
        start_s = cfg.actor.start_timeout_s
        with (
            registered(cfg, book, run_keys, hello, serving=serving, silence_s=silence_s),
            beacon_of(None, name, start_s=start_s) as beacon,
        ):
            on_round = partial(beacon.note, "main", "serving")
            serve(app, sessions, listener, log_level=cfg.log.level, on_round=on_round)


def first_hello(name: str, place: HubPlace, registry: Registry) -> HubHello:
    """Return the hello of a new process of a hub."""
    content = digests_of(contents_of(registry))
    return HubHello(name=name, incarnation=uuid.uuid4().hex[:12], place=place, content=content)


@contextlib.contextmanager
def registered(
    cfg: RunConfig,
    addresses: Addresses,
    keys: RunKeys,
    hello: HubHello,
    *,
    serving: tuple[FastAPI, Sessions],
    silence_s: float | None = None,
) -> Iterator[None]:
    """Register the hub with the scheduler inside the context; report refusals and usage.

    Args:
        serving: the return value of `build`.

    Raises: LongstrideError: the scheduler refuses the hub, or was silent for `silence_s`.
    """
    app, sessions = serving
    registration = Registration(
        addresses,
        keys,
        hello,
        every_s=cfg.scheduler.heartbeat_s,
        silence_s=silence_s,
        refused=app.state.refusals.report,
        sessions=lambda: (len(sessions), sessions.num_places),
        paused=lambda: dict(sessions.services.paused),
    )
    registration.start()
    try:
        yield
    finally:
        registration.stop(timeout_s=GOODBYE_S)
    if registration.error is not None:
        raise registration.error


def public_address(cfg: RunConfig, listener: socket.socket) -> str:
    """Return the hub's address with the advertised host, by which other machines reach it."""
    address = address_of(listener)
    return with_host(address, cfg.envhub.advertise) if cfg.envhub.advertise else address


def serve_alone(cfg: RunConfig, env_names: list[str], *, started: Callable[[str], None]) -> None:
    """Serve environments without a run.

    Args:
        cfg: `envhub.token` is required of clients; with "" no token is required.
        env_names: environments to serve.
        started: called with the hub's address once it is bound.

    Raises:
        ValueError: see `build`.
        OSError: the address cannot be bound.
    """
    token = cfg.envhub.token or None
    app, sessions = build(env_names, cfg.envhub, token=token, options=cfg.envs, remote=cfg.env)
    with _listener(cfg.envhub.host, cfg.envhub.port) as listener:
        listener.listen()  # Clients that read the address can connect; they wait for the server.
        started(address_of(listener))
        serve(app, sessions, listener, log_level=cfg.log.level)


def _with_facts(cfg: RunConfig) -> EnvsSection:
    """Return the options of environments, which give facts for the rewards over a group."""
    return replace(cfg.envs, gives_facts=cfg.envs.gives_facts or bool(cfg.groups.reward))


def envs_of_run(cfg: RunConfig) -> list[str]:
    """Return the environments of the run's tasks and of `envhub.envs`."""
    return sorted({*(task.env for task in cfg.tasks), *cfg.envhub.envs})


def build(
    env_names: list[str],
    section: EnvhubSection,
    *,
    token: str | None,
    options: EnvsSection,
    remote: RemoteOptions,
) -> tuple[FastAPI, Sessions]:
    """Return the application and its session table.

    Raises:
        ValueError: a public address without a token, or a missing requirement of an environment.
        UnknownEnv: no such environment.
    """
    if token is None and not _is_loopback(section.host):
        raise ValueError(
            f"envhub.host={section.host}: other machines can reach the hub without a token."
            " Set envhub.token, or use envhub.host=127.0.0.1."
        )
    if token is not None and not token.strip():
        raise ValueError("envhub.token: the token is empty. Set another one.")
    missing = missing_requirements(env_names, options, remote)
    if missing:
        raise ValueError("; ".join(missing))
    registry = Registry(env_names, options, remote)
    for name in registry.names:
        registry.spec(name)  # A failing import must stop the start, not an episode.
    sessions = Sessions(
        registry,
        idle_s=section.session_idle_s,
        capacity=section.capacity,
        step_timeout_s=section.step_timeout_s,
        max_sessions=section.max_sessions,
        inline_step_s=section.inline_step_s,
        max_action_bytes=section.max_action_mib * MIB,
    )
    app = make_app(
        sessions,
        registry,
        token=token,
        step_timeout_s=section.step_timeout_s,
        max_action_bytes=section.max_action_mib * MIB,
        agentgym=AgentGymLimits(
            idle_s=section.agentgym_idle_s or section.session_idle_s,
            queue_s=section.agentgym_queue_s,
        ),
    )
    return app, sessions


def serve(
    app: FastAPI,
    sessions: Sessions,
    listener: socket.socket,
    *,
    log_level: str,
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; `on_round` is called several times a second.

    After the signal, new sessions get 503 and running calls may finish for DRAIN_S; then the hub
    ends.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=limited_protocol(sessions.counts, app.state.refusals, token=app.state.token),
        ws=QuietSocket,
        ws_max_size=app.state.max_action_bytes + FIELDS_BYTES,
        ws_ping_interval=None,  # A client that generates may miss pings. The idle limit ends it.
        ws_per_message_deflate=False,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_STOP_S,
        backlog=BACKLOG,
        log_level=log_level.lower(),
        log_config=None,
    )
    logger.info("hub starting address=%s", address_of(listener))
    with _signals_end_quietly():
        DrainingServer(config, sessions, on_round).run(sockets=[listener])
    logger.info("hub stopped")


class DrainingServer(uvicorn.Server):
    """A server that drains before it stops; a second signal stops it immediately."""

    def __init__(
        self,
        config: uvicorn.Config,
        sessions: Sessions,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._on_round = on_round
        self._sessions = sessions
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_draining = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and store the event loop for the signal handler."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        # Objects that exist now are permanent. Freezing them excludes them from later collections.
        gc.collect()
        gc.freeze()

    async def on_tick(self, counter: int) -> bool:
        """Run the server's tick, ten times a second, and report that the event loop is alive."""
        self._on_round()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain. The signal handler calls this."""
        if self._loop is None or self._is_draining:
            super().handle_exit(sig, frame)
            return
        self._is_draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        """Start to drain, in the event loop."""
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Wait for running calls, then stop the server."""
        logger.info("hub draining num_sessions=%d", len(self._sessions))
        await self._sessions.drain(DRAIN_S)
        self.should_exit = True


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a host and port."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _previous_port(run_dir: RunDir) -> int:
    """Return the port of the hub that this one replaces, so that its clients find it; else 0."""
    path = run_dir.addresses / "envhub"
    return int(path.read_text(encoding="utf-8").rpartition(":")[2]) if path.exists() else 0


@contextlib.contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Make a stop by signal an ordinary return.

    uvicorn stops on SIGTERM and SIGINT and then raises the signal again for the previous handler.
    The default handler would end the process with a failure code.
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


def _is_loopback(host: str) -> bool:
    """Return whether a host name or an address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
