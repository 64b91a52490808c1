"""Laws of the one list of addresses."""

from common.wire.join_messages import HubPlace
from common.wire.messages import Goodbye, Heartbeat, Hello
from learner.scheduler.members.registry import Registry

HUB = HubPlace(url="http://10.0.0.1:80", token="t", envs=["a"])


def hello(role: str, *, directory: int = -1, **addresses: str) -> Hello:
    return Hello(
        role=role, name=role, incarnation="i", version=0, addresses=addresses, directory=directory
    )


def beat(directory: int) -> Heartbeat:
    return Heartbeat(role="actor", name="actor", version=0, running=[], directory=directory)


def test_who_knows_the_directory_is_not_told_again_until_something_moves() -> None:
    registry = Registry([HUB])
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


def test_who_does_not_ask_is_told_nothing() -> None:
    registry = Registry([HUB])
    assert registry.hear(hello("actor")) is None
    assert registry.hear(beat(-1)) is None
    assert registry.hear(Goodbye(role="actor", name="actor", incarnation="i")) is None
