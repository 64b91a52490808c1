"""Laws of the wire's schema versions: a process and a peer of the previous version."""

import dataclasses
import hashlib
import hmac
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import pytest

from common.errors import WireError
from common.repository import code_name
from common.wire.access.lease_mac import lease_mac
from common.wire.codec import MESSAGE_TYPES, decode, encode, in_version, pack_frames, unpack_record
from common.wire.messages import (
    SCHEMA_VERSION,
    ConfigChanged,
    Enrolment,
    Heartbeat,
    Hello,
    LagBound,
    Progress,
    Rejected,
    Trajectory,
)
from common.wire.versions import (
    OLDEST_RECORD,
    PREVIOUS_VERSION,
    accepted_version,
    fields_by_version,
    version_of,
)
from tools.simulator.workload import synthetic_trajectory

make_trajectory = partial(synthetic_trajectory, group_id="g0", member=0)
HELLO = Hello(role="actor", name="a", incarnation="i", version=0, config=3, commit="commit 1f")
OLD_HELLO = {
    "role": "actor",
    "name": "a",
    "incarnation": "i",
    "version": 0,
    "addresses": {},
    "directory": -1,
    "node": "",
}


def header_of(frames: list[bytes]) -> list[Any]:
    return msgpack.unpackb(frames[0])


def frames_of(version: int, name: str, fields: dict[str, Any]) -> list[bytes]:
    packed = msgpack.packb([version, name, fields])
    assert packed is not None
    return [packed]


def test_schema_file_lists_every_field_of_every_message() -> None:
    """After a new field: add it to the last version of schema.json that no other commit has."""
    fields = {
        name: {field.name for field in dataclasses.fields(cls)}
        for name, cls in MESSAGE_TYPES.items()
    }
    assert {name: set(listed) for name, listed in fields_by_version().items()} == fields


def test_every_later_field_has_a_default() -> None:
    for name, versions in fields_by_version().items():
        if min(versions.values()) == SCHEMA_VERSION:
            continue
        fields = {field.name: field for field in dataclasses.fields(MESSAGE_TYPES[name])}
        for field in (
            fields[each] for each, version in versions.items() if version > OLDEST_RECORD
        ):
            made = (field.default, field.default_factory)
            assert made != (dataclasses.MISSING, dataclasses.MISSING), f"{name}.{field.name}"


def test_message_to_an_older_peer_has_only_its_fields() -> None:
    assert header_of(encode(HELLO, 3)) == [3, "Hello", OLD_HELLO]
    assert header_of(encode(HELLO)) == [
        4,
        "Hello",
        OLD_HELLO | {"config": 3, "commit": "commit 1f"},
    ]


def test_fields_that_an_older_peer_lacks_get_their_defaults() -> None:
    assert decode(frames_of(3, "Hello", OLD_HELLO)) == replace(HELLO, config=-1, commit="")
    beat = Heartbeat(role="actor", name="a", version=1, running=["g/0"], config=2)
    assert decode(encode(beat, 3)) == replace(beat, config=-1)
    enrolment = Enrolment(run_name="r", config="run: {}", defaults=["run.seed"])
    assert decode(encode(enrolment, 3)) == replace(enrolment, defaults=[])


def test_nested_messages_and_arrays_reach_an_older_peer_unchanged() -> None:
    bound = LagBound(env="maze", horizon=5, max_lag_steps=9)
    progress = Progress(run_epoch="e", revoked=[], is_finished=False, lag_bounds=[bound])
    assert decode(encode(progress, 3)) == progress
    trajectory = make_trajectory([5, 6, 7], [0, 1, 1])
    frames = encode(trajectory, 3)
    assert version_of(frames) == 3
    message = decode(frames)
    assert isinstance(message, Trajectory)
    assert message.token_ids.tolist() == [5, 6, 7]
    assert in_version(encode(trajectory), 3) == frames
    assert in_version(frames, 3) is frames


def test_message_that_an_older_version_lacks_is_not_sent() -> None:
    with pytest.raises(WireError, match="ConfigChanged is no message of schema version 3"):
        encode(ConfigChanged(number=1, step=1), 3)


def test_journal_and_logs_of_the_first_version_stay_readable() -> None:
    record = pack_frames(encode(make_trajectory([5, 6], [0, 1]), OLDEST_RECORD))
    assert unpack_record(record).token_ids.tolist() == [5, 6]


def test_larger_gap_names_both_commits() -> None:
    fields = OLD_HELLO | {"commit": "commit 77aa"}
    reason = rf"schema version 5 of commit 77aa, but {code_name()} understands 3 and 4".replace(
        "+", r"\+"
    )
    with pytest.raises(WireError, match=reason):
        decode(frames_of(5, "Hello", fields))
    refusal = Rejected(reason="schema version 4 of commit 77aa, but commit 1c understands 1 and 2")
    with pytest.raises(WireError) as raised:
        accepted_version(refusal, encode(refusal, 2), current=4)
    assert "commit 77aa" in str(raised.value)
    assert "commit 1c" in str(raised.value)
    assert code_name() in str(raised.value)


def test_refusal_is_read_in_every_version() -> None:
    refusal = Rejected(reason="schema version 4, but this process uses 1")
    for version in (1, 3, 4, 9):
        frames = encode(refusal, version)
        assert version_of(frames) == version
        assert decode(frames) == refusal


def test_peer_is_addressed_in_the_lower_of_both_versions() -> None:
    old = Rejected(reason="schema version 4, but this process uses 3")
    assert accepted_version(old, encode(old, 3), current=4) == PREVIOUS_VERSION == 3
    other = Rejected(reason="the key of a is revoked")
    assert accepted_version(other, encode(other, 3), current=4) == 4
    assert accepted_version(HELLO, encode(HELLO, 3), current=4) == 4


def test_lease_mac_is_the_same_before_and_after_an_upgrade() -> None:
    """Fields of the first version count always, later ones only with another value."""
    lease = make_trajectory([5, 6], [0, 1])
    names = (
        "episode_id group_id member attempt kind policy env item_id seed horizon horizon_stage"
        " opened_at_version horizon_unit distance distance_stage max_turns"
    )
    text = "\0".join(["actor-0", *(str(getattr(lease, name)) for name in names.split())])
    expected = hmac.new(b"key", text.encode(), hashlib.sha256).hexdigest()[:32]
    assert lease_mac(lease, "actor-0", b"key") == expected
