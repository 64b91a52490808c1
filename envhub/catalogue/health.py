"""Whether the servers that a configuration names answer; asked before anything starts."""

import http.client
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

from common.config.envs import EnvsSection, RemoteOptions
from envhub.envs.webarena.remote_sites import configured

TIMEOUT_S = 5.0
MAX_AT_ONCE = 16


class Server(NamedTuple):
    """An address of the configuration, and what to do when nobody is there."""

    key: str
    url: str
    remedy: str
    is_hub: bool = False  # then its state must be fine; of others any answer at all will do


def servers_of(
    env_names: Sequence[str], options: EnvsSection, remote: RemoteOptions
) -> list[Server]:
    """Return the servers that these environments ask while they are played."""
    found: list[Server] = []
    if remote.dialect in env_names:
        remedy = f"start AgentGym's {remote.dialect} server, or give its address"
        found.append(Server(key="env.url", url=remote.url, remedy=remedy))
    if "searchqa" in env_names and options.searchqa.retriever_url:
        url, key = options.searchqa.retriever_url, "envs.searchqa.retriever_url"
        remedy = "start the retriever, or give envs.searchqa.corpus instead"
        found.append(Server(key=key, url=url, remedy=remedy))
    if "webarena" in env_names:
        remedy = "start this site of WebArena, or give its address"
        sites = configured(options.webarena).items()
        found += [Server(key=f"envs.webarena.{n}", url=u, remedy=remedy) for n, u in sites]
    return found


def hub_at(url: str) -> Server:
    """Return the hub that `envhub.url` names."""
    remedy = "start it with `python run.py envhub`, or unset envhub.url for a hub of the run's own"
    return Server(key="envhub.url", url=url, remedy=remedy, is_hub=True)


def silent(servers: Sequence[Server]) -> list[str]:
    """Return a line with its remedy for each server that does not answer; asks all at once."""
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        problems = list(pool.map(_problem, servers))
    return [
        f"{server.key}={_shown(server.url)}: no answer ({problem}); {server.remedy}"
        for server, problem in zip(servers, problems, strict=True)
        if problem
    ]


def _problem(server: Server) -> str:
    """Return why a server is of no use, "" if it answers."""
    try:
        status = _ask(f"{server.url.rstrip('/')}/healthz" if server.is_hub else server.url)
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    except (http.client.HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
    is_fine = status == http.client.OK or not server.is_hub
    return "" if is_fine else f"/healthz answered {status}, so this is no hub"


def _ask(url: str) -> int:
    """Return the status of a GET, without a proxy and without following redirections."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it is no address such as http://host:8080")
    is_tls = parts.scheme == "https"
    kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status
    finally:
        connection.close()


def _shown(url: str) -> str:
    """Return an address without the password that it may have."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"
