"""Checks before a start whether the servers named in a configuration answer."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import NamedTuple

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection
from common.config.tasks import TaskSection
from common.http.blocking import HttpResponse, request
from common.http.proxies import without_login
from common.text import known_hint

TIMEOUT_S = 5.0
MAX_AT_ONCE = 16
MAX_BODY_BYTES = 16 << 20


class ServerAddress(NamedTuple):
    """A server address of the configuration, and the remedy if it does not answer."""

    key: str
    url: str
    remedy: str
    # A hub must report a healthy state; from other servers any answer is accepted.
    is_hub: bool = False
    is_direct: bool = False  # Requests of its environment bypass the proxy.


def servers_of(
    env_names: Sequence[str], options: EnvsSection, remote: RemoteOptions
) -> list[ServerAddress]:
    """Return the servers to which these environments send requests during episodes."""
    servers: list[ServerAddress] = []
    if remote.dialect in env_names:
        whose = "the OpenEnv" if remote.dialect == "openenv" else f"AgentGym's {remote.dialect}"
        remedy = f"start {whose} server, or correct its address"
        servers.append(ServerAddress(key="env.url", url=remote.url, remedy=remedy))
    if "searchqa" in env_names and options.searchqa.retriever_url:
        url = options.searchqa.retriever_url
        key = "envs.searchqa.retriever_url"
        remedy = "start the retriever, or use envs.searchqa.corpus instead"
        servers.append(ServerAddress(key=key, url=url, remedy=remedy))
    if "webarena" in env_names:
        remedy = "start this site of WebArena, or correct its address"
        sites = options.webarena.sites.items()
        servers += [
            ServerAddress(key=f"envs.webarena.{name}", url=url, remedy=remedy, is_direct=True)
            for name, url in sites
        ]
    return servers


def hub_at(url: str) -> ServerAddress:
    """Return the hub at `envhub.url`."""
    remedy = "start it with `python run.py envhub`, or unset envhub.url to use the run's own hub"
    return ServerAddress(key="envhub.url", url=url, remedy=remedy, is_hub=True)


def silent(servers: Sequence[ServerAddress]) -> list[str]:
    """Return a line with its remedy for each server that does not answer; runs in parallel."""
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        problems = list(pool.map(_problem, servers))
    return [
        f"{server.key}={without_login(server.url)}: no answer ({problem}); {server.remedy}"
        for server, problem in zip(servers, problems, strict=True)
        if problem
    ]


def _problem(server: ServerAddress) -> str:
    """Return why a server is unusable; "" if it answers."""
    try:
        url = f"{server.url.rstrip('/')}/healthz" if server.is_hub else server.url
        answer = _get(url, "", is_own=server.is_hub or server.is_direct)
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    except ValueError as error:
        return str(error) or type(error).__name__
    if answer.is_by_proxy:
        return f"the answer is {answer.shown}"
    is_fine = answer.status == HTTPStatus.OK or not server.is_hub
    return "" if is_fine else f"/healthz answered {answer.status}, so this is not a hub"


def not_served(
    url: str, token: str, tasks: Sequence[TaskSection], *, may_be_own: bool, is_to_train: bool
) -> list[str]:
    """Return why a hub that answers cannot serve tasks, one line each; [] if it can.

    Args:
        may_be_own: the hub may require the token of the run's own keys, which is not available
            here.
        is_to_train: the tasks are also trained on, and not only evaluated.
    """
    shown = without_login(url)
    try:
        answer = _get(f"{url.rstrip('/')}/v1/envs", token, is_own=True)
        if answer.status in (401, 403):
            does = "refuses this token" if token else "requires a token"
            words = f"the hub at {shown} {does}; use the token with which it was started"
            return [] if may_be_own and not token else [f"envhub.token: {words}"]
        catalogue = json.loads(answer.body).items()
        envs = {
            name: {subset: int(sizes["num_train"]) for subset, sizes in env["subsets"].items()}
            for name, env in catalogue
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"envhub.url={shown}: /v1/envs is not a hub's catalogue: {error}"]
    lines: list[str] = []
    for i, task in enumerate(tasks):
        subsets = envs.get(task.env)
        if subsets is None:
            near = known_hint(task.env, envs)
            lines.append(f"tasks[{i}].env={task.env!r}: the hub at {shown} does not serve it{near}")
        elif task.subset not in subsets:
            near = known_hint(task.subset, subsets)
            what = f"the hub at {shown} has no such subset of {task.env}"
            lines.append(f"tasks[{i}].subset={task.subset!r}: {what}{near}")
        elif is_to_train:
            lines += untrainable(i, task, subsets[task.subset])
    return lines


def untrainable(number: int, task: TaskSection, num_train: int) -> list[str]:
    """Return a line if a training task has no training items."""
    if num_train or task.weight <= 0:
        return []
    return [
        f"tasks[{number}].subset={task.subset!r}: it has no training items in {task.env}; use"
        f" another one (`python run.py envs env={task.env}` lists them)"
    ]


def _get(url: str, token: str, *, is_own: bool) -> HttpResponse:
    """Return a server's answer to a GET request with the token."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return request(
        url, headers=headers, timeout_s=TIMEOUT_S, max_bytes=MAX_BODY_BYTES, is_own=is_own
    )
