"""Laws of the wire format."""

import dataclasses
import time
import typing
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from common.errors import WireError
from common.weights.messages import TensorSpec
from common.wire.access.bounds import shown
from common.wire.codec import (
    ARRAY_DTYPES,
    MAX_HEADER_BYTES,
    MESSAGE_TYPES,
    decode,
    encode,
    pack_record,
    unpack_record,
)
from common.wire.messages import SCHEMA_VERSION, Ack, LeaseGrant, Rejected
from tests.learner.builders import make_trajectory

INT64 = st.integers(-(2**63), 2**63 - 1)
ACK = Ack(episode_id="g/0", is_accepted=True, reason="")


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's declared type within its bounds."""
    if typing.get_origin(kind) is typing.Annotated:
        plain, meta = typing.get_args(kind)
        if plain is int:
            return st.integers(meta.ge, meta.le)
        if plain is float:
            return st.floats(meta.ge, meta.le)
        return values_of(plain)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})
    if kind is np.ndarray:
        shapes = np_st.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4)
        return np_st.arrays(st.sampled_from(ARRAY_DTYPES), shapes)
    if typing.get_origin(kind) is list:
        return st.lists(values_of(typing.get_args(kind)[0]), max_size=3)
    if typing.get_origin(kind) is dict:
        keys, values = (values_of(each) for each in typing.get_args(kind))
        return st.dictionaries(keys, values, max_size=3)
    if issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    return {
        str: st.text(st.characters(codec="utf-8"), max_size=8),
        int: INT64,
        float: st.floats(),
        bool: st.booleans(),
        bytes: st.binary(max_size=8),
    }[kind]


@pytest.mark.parametrize("kind", MESSAGE_TYPES.values(), ids=lambda kind: kind.__name__)
def test_every_field_has_bounds(kind: type) -> None:
    hints = typing.get_type_hints(kind, include_extras=True)
    unbounded = {str, int, float, bytes, list, dict}
    bare = [name for name, hint in hints.items() if (typing.get_origin(hint) or hint) in unbounded]
    assert bare == []


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, including arrays and NaN."""
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        fields = (f.name for f in dataclasses.fields(one))
        return all(is_same(getattr(one, name), getattr(other, name)) for name in fields)
    if isinstance(one, np.ndarray):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and one.tobytes() == other.tobytes()
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    return one == other or (one != one and other != other)


def pack(value: Any) -> bytes:
    packed = msgpack.packb(value)
    assert packed is not None
    return packed


def frames_of(name: str, fields: Any, *arrays: bytes, schema: Any = SCHEMA_VERSION) -> list[bytes]:
    return [pack([schema, name, fields]), *arrays]


LAST = len(encode(make_trajectory([1], [1])))  # index of a frame behind a trajectory's own


def ack_fields(**changes: Any) -> dict[str, Any]:
    return {"episode_id": "g/0", "is_accepted": True, "reason": ""} | changes


def step_fields(**changes: Any) -> dict[str, Any]:
    return {"version": 1, "is_last": True, "max_ahead_steps": 1, "signals": {}} | changes


def trajectory_frames(**changes: Any) -> list[bytes]:
    """A good trajectory with some plain fields replaced."""
    frames = encode(make_trajectory([5, 6, 7], [0, 1, 1]))
    schema, name, fields = msgpack.unpackb(frames[0])
    return [pack([schema, name, fields | changes]), *frames[1:]]


@pytest.mark.parametrize("kind", MESSAGE_TYPES.values(), ids=lambda kind: kind.__name__)
def test_every_message_round_trips_over_the_wire(kind: type) -> None:
    @settings(max_examples=8)
    @given(values_of(kind))
    def check(message: Any) -> None:
        assert is_same(decode(encode(message)), message)
        assert is_same(unpack_record(pack_record(message)), message)

    check()


@pytest.mark.parametrize("kind", MESSAGE_TYPES.values(), ids=lambda kind: kind.__name__)
def test_field_order_does_not_change_decoding(kind: type) -> None:
    def read(schema: int, name: str, fields: dict[str, Any], *arrays: bytes) -> Any:
        try:
            return decode([pack([schema, name, fields]), *arrays])
        except WireError:
            return None

    @settings(max_examples=12)
    @given(values_of(kind), st.data())
    def check(message: Any, draw: st.DataObject) -> None:
        frames = encode(message)
        schema, name, fields = msgpack.unpackb(frames[0])
        if draw.draw(st.booleans()):  # one that is perhaps wrong
            fields[draw.draw(st.sampled_from(sorted(fields)))] = draw.draw(PLAIN)
        backwards = dict(reversed(fields.items()))
        in_order = read(schema, name, fields, *frames[1:])
        assert is_same(in_order, read(schema, name, backwards, *frames[1:]))
        assert len(fields) == 1 or list(fields) != list(backwards)

    check()


def test_integers_widen_to_declared_floats() -> None:
    fields = {"leases": [], "retry_after_s": 2, "reason": ""}
    grant = decode(frames_of("LeaseGrant", fields))
    assert grant == LeaseGrant(leases=[], retry_after_s=2.0, reason="")
    assert type(grant.retry_after_s) is float


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "no header"),
        ([b"\0" * (MAX_HEADER_BYTES + 1)], "size limit"),
        ([b"\xc1"], "not msgpack"),
        ([pack([1, "Ack"])], "not \\[schema"),
        (frames_of("Ack", ack_fields(), schema=99), "schema version 99"),
        (frames_of("Ack", ack_fields(), schema=True), "schema version True"),
        (frames_of("Nack", ack_fields()), "unknown message type 'Nack'"),
        (frames_of("EndReason", {}), "unknown message type"),
        (frames_of("Ack", [1, 2, 3]), "not a map"),
        (frames_of("Ack", ack_fields(extra=1)), "unknown fields \\['extra'\\]"),
        (frames_of("Ack", {"episode_id": "g/0", "is_accepted": True}), "missing fields"),
        (frames_of("Ack", ack_fields(reason=3)), r"Ack\.reason: Expected `str`, got `int`"),
        (
            frames_of("Ack", ack_fields(is_accepted=1)),
            r"Ack\.is_accepted: Expected `bool`, got `int`",
        ),
        (
            frames_of("StepDone", step_fields(version=True)),
            r"StepDone\.version: Expected `int`, got `bool`",
        ),
        (
            frames_of("StepDone", step_fields(version=1.0)),
            r"StepDone\.version: Expected `int`, got `float`",
        ),
        (
            frames_of("StepDone", step_fields(signals=[])),
            r"StepDone\.signals: Expected `object`, got `array`",
        ),
        (
            frames_of("StepDone", step_fields(signals={"ess": "1"})),
            r"StepDone\.signals\[\.\.\.\]: Expected `float`, got `str`",
        ),
        (frames_of("CanaryScores", {"actor": "a", "version": 1, "logprobs": [[True]]}), "bool"),
        (
            frames_of("CanaryScores", {"actor": "a", "version": 1, "logprobs": 1}),
            r"CanaryScores\.logprobs: Expected `array`",
        ),
    ],
)
def test_wire_refuses_frames_outside_its_schema(frames: list[bytes], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(frames)


def test_field_with_a_default_may_be_missing() -> None:
    fields = {"version": 1, "is_last": False, "max_ahead_steps": 2, "signals": {}}
    assert decode(frames_of("StepDone", fields)).number == 0
    assert decode(frames_of("StepDone", fields | {"number": 7})).number == 7


def test_older_peer_trajectory_starts_at_score_zero() -> None:
    sent = make_trajectory([5, 6], [0, 1])
    schema, name, fields = msgpack.unpackb(encode(sent)[0])
    del fields["start_score"]
    older = [msgpack.packb([schema, name, fields]), *encode(sent)[1:]]
    assert decode(older).start_score == 0.0


@pytest.mark.parametrize("value", ["neither", 3, ["train"], None])
def test_wire_refuses_values_outside_the_enum(value: Any) -> None:
    with pytest.raises(WireError, match=r"Trajectory\.kind"):
        decode(trajectory_frames(kind=value))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        ([1, "int32", [4]], "12 bytes for shape"),
        ([1, "float64", [3]], "not \\[frame"),
        ([1, "int32", [-3]], "not \\[frame"),
        ([1, "int32", [3.0]], "not \\[frame"),
        ([0, "int32", [3]], "refers to frame 0"),
        ([99, "int32", [3]], "refers to frame 99"),
        ([1, "int32", [2**62, 2**62]], "not \\[frame"),
        ([1, "int32", [2**28, 2**28]], "bytes for shape"),
        ([LAST, "int32", [0, *[2**28] * 3]], "array is too big"),
        ([LAST, "int32", [0] + [1] * 70], "not \\[frame"),
        ("abc", "not \\[frame"),
    ],
)
def test_wire_refuses_an_array_unlike_its_frame(array: Any, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode([*trajectory_frames(token_ids=array), b""])


def test_wire_refuses_bools_beyond_0_and_1() -> None:
    frames = trajectory_frames(loss_mask=[LAST, "bool", [3]])
    assert decode([*frames, b"\0\1\1"]).loss_mask.tolist() == [False, True, True]
    with pytest.raises(WireError, match="a bool must be 0 or 1"):
        decode([*frames, b"\0\1\2"])


def test_unpackable_message_leaves_the_next_one_intact() -> None:
    whole = Rejected(reason="whole")
    before = encode(whole)
    with pytest.raises((TypeError, OverflowError)):
        encode(Rejected(reason=typing.cast(str, ["begun", object()])))
    assert encode(whole) == before


def test_encode_refuses_non_messages() -> None:
    with pytest.raises(WireError, match="dict is not a message"):
        encode({"a": 1})
    doubles = dataclasses.replace(make_trajectory([1], [1]), logprobs=np.zeros(1))
    with pytest.raises(WireError, match="float64"):
        encode(doubles)


def test_encode_accepts_a_non_contiguous_array() -> None:
    every_other = np.arange(6, dtype=np.int32)[::2]
    message = dataclasses.replace(make_trajectory([1, 1, 1], [0, 1, 1]), token_ids=every_other)
    assert decode(encode(message)).token_ids.tolist() == [0, 2, 4]


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_frames_raise_only_wire_errors(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


PLAIN = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sampled_from(sorted(make_trajectory([1], [1]).__slots__)), PLAIN)
def test_foreign_field_raises_only_wire_errors(name: str, value: Any) -> None:
    try:
        decode(trajectory_frames(**{name: value}))
    except WireError:
        return


@settings(max_examples=300)
@given(st.data())
def test_damaged_record_raises_only_wire_errors(data: st.DataObject) -> None:
    record = bytearray(pack_record(make_trajectory([5, 6, 7], [0, 1, 1])))
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] = data.draw(st.integers(0, 255))
    try:
        unpack_record(bytes(record[: data.draw(st.integers(place, len(record)))]))
    except WireError:
        return


def test_foreign_record_is_refused() -> None:
    with pytest.raises(WireError, match="list of frames"):
        unpack_record(pack({"a": 1}))
    assert unpack_record(pack_record(Rejected(reason="x"))) == Rejected(reason="x")
    spec = TensorSpec(name="w", shape=[2, 3], dtype="bfloat16", offset_bytes=0, num_bytes=12)
    assert decode(encode(spec)) == spec
    assert decode(encode(ACK)) == ACK


def seen_fields(**changes: Any) -> dict[str, Any]:
    told = {"episode_id": "g1/0", "reward": 1.0, "is_success": True, "end_reason": "done"}
    return {"seen": [told | {"num_turns": 1, "wall_s": 1.0} | changes]}


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        (frames_of("StepDone", step_fields(version=10**9 + 1)), "StepDone.version"),
        (frames_of("Outcomes", {"num_duplicates": -(10**9)}), "Outcomes.num_duplicates"),
        (frames_of("Outcomes", seen_fields(wall_s=float("nan"))), "wall_s"),
        (frames_of("Outcomes", seen_fields(wall_s=float("inf"))), "wall_s"),
        (frames_of("Outcomes", seen_fields(episode_id="g" + "9" * 5_000)), "episode_id"),
        (frames_of("Ack", ack_fields(episode_id="9" * 5_000)), "Ack.episode_id"),
        (trajectory_frames(num_turns=-1), "Trajectory.num_turns"),
        (trajectory_frames(horizon=10**17), "Trajectory.horizon"),
        (trajectory_frames(token_ids=[1, "int32", [2] * 20_000]), "token_ids"),
        (trajectory_frames(token_ids=[1, "int32", [2**62] * 8]), "token_ids"),
        (frames_of("T" * 15_000_000, {}), "unknown message type"),
        (frames_of("Ack", {"k" * 1_000_000: 1}), "missing fields"),
        ([pack(["x" * 1_000_000, "Ack", {}])], "schema version"),
        ([*encode(ACK), *[b""] * 1_000], "too many frames"),
    ],
)
def test_values_beyond_bounds_get_short_refusals(frames: list[bytes], named: str) -> None:
    began = time.process_time()
    with pytest.raises(WireError, match=named) as refused:
        decode(frames)
    assert len(str(refused.value)) < 500
    assert time.process_time() - began < 0.5


def test_shown_value_is_short_at_any_depth() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert len(shown(nested)) < 500
    assert len(shown({"a" * 10_000: ["b" * 10_000] * 1_000})) < 2_000
