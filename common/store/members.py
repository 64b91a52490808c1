"""The roles of a run and their machines, from the run's status.json."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

from common.store.run_dir import as_map
from common.text import counted


def members_of(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return learner, actors, scheduler and hubs of a status.json. Each has a name and a role."""
    rows = [status.get("learner"), *_list(status, "actors"), status.get("scheduler")]
    members = [as_map(member) for member in (*rows, *_list(status, "hubs"))]
    return [
        {**member, "name": str(member["name"]), "role": str(member["role"])}
        for member in members
        if member.get("name") and member.get("role")
    ]


def node_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each machine with its roles, and one for each hub."""
    members = members_of(status)
    nodes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for member in members:
        if member.get("node"):
            nodes[str(member["node"])].append(member)
    for node, on_node in nodes.items():
        names = ", ".join(member["name"] + _gone(member) for member in on_node)
        live = [member for member in on_node if not _gone(member)]
        gib = sum(_number(member, "rss_bytes") for member in live) / 2**30
        cpu_s = sum(_number(member, "cpu_s") for member in on_node)
        yield f"node {node}: {names}; {gib:.1f} GiB, {cpu_s:.0f} processor seconds"
    for member in members:
        if member["role"] == "envhub":
            yield f"hub {member['name']}: {hub_text(member)}"


def hub_text(hub: Mapping[str, Any]) -> str:
    """Return one line with a hub's address, environments and sessions."""
    where = f" on {hub['node']}" if hub.get("node") else ""
    places = ""
    if hub.get("max_sessions"):
        places = f", {hub.get('num_sessions', 0)} of {counted(hub['max_sessions'], 'session')}"
    heard = f", last message {_number(hub, 'last_seen_s'):.0f}s before the status"
    waits = [f"{env} ({reason})" for env, reason in as_map(hub.get("paused")).items()]
    again = f", paused: {'; '.join(waits)}" if waits else ""
    again += (
        f", restarted {counted(hub['num_restarts'], 'time')}" if hub.get("num_restarts") else ""
    )
    return (
        f"{hub.get('gone') or 'serves'} {', '.join(_list(hub, 'envs'))} at {hub.get('url')}{where}"
        f"{places}{again}{heard if 'last_seen_s' in hub else ''}"
    )


def _gone(member: Mapping[str, Any]) -> str:
    """Return the reason of a role's absence in brackets, "" for a live role."""
    words = member.get("gone") or (member.get("is_dead") and "gone")
    words = words or (member.get("is_silent") and "silent")
    return f" ({words})" if words else ""


def _list(row: Mapping[str, Any], key: str) -> list[Any]:
    value = row.get(key)
    return [*cast("list[Any]", value)] if isinstance(value, list) else []


def _number(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
