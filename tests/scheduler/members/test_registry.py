"""Laws of the one list of addresses."""

from dataclasses import replace

from common.store.members import hub_text
from common.wire.messages import (
    Goodbye,
    Heartbeat,
    Hello,
    HubGoodbye,
    HubHello,
    HubNoted,
    HubPlace,
    HubUse,
    Rejected,
)
from scheduler.members.registry import AddressRegistry

HUB = HubPlace(url="http://10.0.0.1:80", token="t", envs=["a"])


def hello(role: str, *, directory: int = -1, **addresses: str) -> Hello:
    return Hello(
        role=role, name=role, incarnation="i", version=0, addresses=addresses, directory=directory
    )


def hub_hello(name: str, url: str, *, incarnation: str = "i") -> HubHello:
    place = HubPlace(url=url, token="t", envs=["a"])
    return HubHello(name=name, incarnation=incarnation, place=place)


def registry_with(*fixed: HubPlace) -> AddressRegistry:
    registry = AddressRegistry(10.0)
    for place in fixed:
        registry.add_fixed(place)
    return registry


def urls(registry: AddressRegistry) -> list[str]:
    return [place.url for place in registry.directory.hubs]


def beat(directory: int) -> Heartbeat:
    return Heartbeat(role="actor", name="actor", version=0, running=[], directory=directory)


def test_directory_is_sent_only_after_change() -> None:
    registry = registry_with(HUB)
    first = registry.hear(hello("actor", directory=0))
    assert first is not None
    assert (first.learner, first.hubs) == ("", [HUB])
    assert registry.hear(beat(first.number)) is None
    assert registry.hear(hello("learner", learner="tcp://*:1", weights="tcp://*:2")) is None
    second = registry.hear(beat(first.number))
    assert second is not None
    assert (second.learner, second.weights) == ("tcp://*:1", "tcp://*:2")
    registry.hear(hello("learner", learner="tcp://*:1", weights="tcp://*:2"))
    assert registry.hear(beat(second.number)) is None
    registry.hear(hello("learner", learner="tcp://*:3", weights="tcp://*:4"))
    third = registry.hear(beat(second.number))
    assert third is not None
    assert third.learner == "tcp://*:3"


def test_member_without_directory_number_receives_none() -> None:
    registry = registry_with(HUB)
    assert registry.hear(hello("actor")) is None
    assert registry.hear(beat(-1)) is None
    assert registry.hear(Goodbye(role="actor", name="actor", incarnation="i")) is None


def test_departed_or_silent_hub_leaves_directory() -> None:
    registry = registry_with(HUB)
    for name in ("b", "c"):
        noted = registry.hear_hub(hub_hello(name, f"http://{name}"), b"1", 0.0)
        assert noted == HubNoted(is_finished=False)
    assert urls(registry) == [HUB.url, "http://b", "http://c"]
    number = registry.directory.number
    registry.hear_hub(hub_hello("c", "http://c"), b"1", 9.0)
    assert registry.directory.number == number, "a hub that is known is no news"
    registry.expire(11.0)
    assert urls(registry) == [HUB.url, "http://c"]
    registry.hear_hub(HubGoodbye(name="c", incarnation="former"), b"1", 11.0)
    assert urls(registry) == [HUB.url, "http://c"]
    registry.hear_hub(HubGoodbye(name="c", incarnation="i"), b"1", 11.0)
    assert urls(registry) == [HUB.url]


def test_restarted_hub_replaces_its_old_entry() -> None:
    registry = registry_with()
    registry.hear_hub(hub_hello("b", "http://b:1"), b"1", 0.0)
    before = registry.directory.number
    registry.hear_hub(hub_hello("b", "http://b:2", incarnation="j"), b"2", 0.0)
    assert urls(registry) == ["http://b:2"]
    assert registry.directory.number > before
    assert registry.hub_senders == [b"2"]
    noted = registry.hear_hub(hub_hello("b", "http://b:2"), b"2", 0.0, is_finished=True)
    assert noted == HubNoted(is_finished=True)


def test_hub_with_other_items_than_the_run_is_refused() -> None:
    registry = registry_with()
    files = {"dataset": "a", "terminal": "b"}
    first = replace(hub_hello("b", "http://b"), content=files)
    noted = HubNoted(is_finished=False)
    assert registry.hear_hub(first, b"1", 0.0) == noted
    other = replace(hub_hello("c", "http://c"), content={"dataset": "A", "terminal": "b"})
    refused = registry.hear_hub(other, b"2", 0.0)
    assert isinstance(refused, Rejected)
    assert refused.reason.startswith("its items of dataset are not those of the run")
    assert urls(registry) == ["http://b"]
    for name, content in (("d", {"dataset": "a"}), ("e", {"code": "c"}), ("f", {})):
        hello = replace(hub_hello(name, f"http://{name}"), content=content)
        assert registry.hear_hub(hello, b"3", 0.0) == noted


def test_refused_hub_decides_about_no_environment() -> None:
    registry = registry_with()
    first = replace(hub_hello("b", "http://b"), content={"dataset": "a"})
    other = replace(hub_hello("c", "http://c"), content={"dataset": "A", "code": "C"})
    third = replace(hub_hello("d", "http://d"), content={"dataset": "a", "code": "c"})
    noted = HubNoted(is_finished=False)
    assert registry.hear_hub(first, b"1", 0.0) == noted
    assert isinstance(registry.hear_hub(other, b"2", 0.0), Rejected)
    assert registry.hear_hub(third, b"3", 0.0) == noted


def test_items_of_the_own_hub_are_those_of_the_run() -> None:
    registry = registry_with()
    joined = replace(hub_hello("b", "http://b"), content={"dataset": "a"})
    registry.hear_hub(joined, b"1", 0.0)
    own = replace(hub_hello("envhub", "http://own"), content={"dataset": "A"})
    assert registry.hear_hub(own, b"2", 0.0) == HubNoted(is_finished=False)
    assert isinstance(registry.hear_hub(joined, b"1", 1.0), Rejected)
    assert urls(registry) == ["http://own"]


def test_report_shows_paused_environments_with_their_reason() -> None:
    registry = AddressRegistry(dead_after_s=5.0)
    hello = replace(hub_hello("hub", "http://h:1"), paused={"dataset": "judge style is down"})
    registry.hear_hub(hello, b"hub", 1.0)
    (row,) = registry.report(1.0)
    assert row["paused"] == {"dataset": "judge style is down"}
    assert ", paused: dataset (judge style is down)" in hub_text(row)
    registry.hear_hub(replace(hello, paused={}), b"hub", 2.0)
    (row,) = registry.report(2.0)
    assert "paused" not in hub_text(row)


def test_report_lists_present_and_departed_hubs_without_tokens() -> None:
    registry = registry_with(HUB)
    use = HubUse(num_sessions=3, max_sessions=8, rss_bytes=5, cpu_s=1.5)
    here = replace(hub_hello("envhub", "http://*:1"), node="alpha", use=use)
    there = replace(hub_hello("b", "http://10.0.0.2:1"), node="beta (10.0.0.2)")
    for each in (here, there, replace(there, incarnation="j")):
        registry.hear_hub(each, b"1", 0.0)
    fixed, own, joined = registry.report(2.0)
    assert "token" not in str((fixed, own, joined))
    assert (fixed["name"], fixed["envs"]) == (HUB.url, ["a"])
    assert (own["url"], own["node"]) == ("http://alpha:1", "alpha")
    assert [own[key] for key in ("num_sessions", "max_sessions", "rss_bytes")] == [3, 8, 5]
    assert (own["cpu_s"], own["last_seen_s"]) == (1.5, 2.0)
    assert (own["num_restarts"], joined["num_restarts"], joined["gone"]) == (0, 1, "")
    registry.hear_hub(HubGoodbye(name="envhub", incarnation="i"), b"1", 3.0)
    registry.expire(11.0)
    assert [each.get("gone") for each in registry.report(11.0)] == [None, "left", "silent"]
    registry.hear_hub(replace(there, incarnation="k"), b"1", 3600.0)
    _, back, gone = registry.report(3600.0)
    assert (back["num_restarts"], back["gone"], gone["name"]) == (2, "", "envhub")
    registry.expire(3605.0)
    assert [each["name"] for each in registry.report(3605.0)] == [HUB.url, "b"]
