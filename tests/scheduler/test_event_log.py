"""What survives a kill: the saved state and every message that was handled since."""

import json
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.wire.codec import encode
from common.wire.messages import EndReason, Lease, Outcome
from scheduler import event_log
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from scheduler.event_log import EventLog
from scheduler.main import LoopClock, resume
from tests.scheduler.builders import CATALOGUE, Table, make_config, seen_of


class LoggedCore(SchedulerCore):
    """A core that logs its messages like the event loop."""

    def __init__(self, folder: Path) -> None:
        self.now = LoopClock(100.0)
        self.log = EventLog(folder)
        super().__init__(build_components(make_config(num_steps=1_000), CATALOGUE), clock=self.now)
        self.save()

    def handle(self, sender_name: str, message: Any) -> Any:
        answer = super().handle(sender_name, message)
        self.log.append(self.now.now, sender_name, encode(message))
        return answer

    def tick(self, *, is_replay: bool = False) -> bool:
        if is_due := super().tick(is_replay=is_replay):
            self.log.append(self.now.now, "", [])
        return is_due

    def save(self) -> None:
        saved = {"core": self.snapshot(with_volatile=True), "time_s": self.now.now}
        self.log.save(saved | {"port": 77})


@pytest.fixture
def core(tmp_path: Path) -> Iterator[LoggedCore]:
    logged = LoggedCore(tmp_path)
    yield logged
    logged.log.close()


def _table(core: SchedulerCore) -> Table:
    table = Table()
    table.core = core
    return table


def _resumed(folder: Path, *, launched_at: float | None = None) -> SchedulerCore:
    clock = LoopClock(0.0)
    core = SchedulerCore(build_components(make_config(num_steps=1_000), CATALOGUE), clock=clock)
    resume(core, clock, EventLog(folder), launched_at=launched_at)
    return core


def _live(core: LoggedCore, rng: random.Random, num: int) -> None:
    """Random life of three actors and a learner."""
    table = _table(core)
    playing: dict[str, list[Lease]] = {f"actor-{i}": [] for i in range(3)}
    for i in range(num):
        core.now.now += rng.choice([0.1, 0.1, 0.5, 3.0])
        name = rng.choice(sorted(playing))
        match rng.randrange(6):
            case 0 | 1:
                playing[name] += table.ask(name, rng.randrange(6)).leases
            case 2:
                table.beat(name, [x.episode_id for x in playing[name] if rng.random() < 0.8])
            case 3:
                table.hello(name, incarnation=f"i{rng.randrange(2)}")
            case 4:
                table.arrive(playing[name][:2])
                for lease in playing[name][:2]:
                    if lease.group_id in core.lifecycle.table.groups and rng.random() < 0.3:
                        table.finish_group(lease.group_id, Outcome.FILTERED)
                playing[name] = playing[name][2:]
            case 5:
                core.tick()
        if i % 40 == 17:
            core.save()


@pytest.mark.parametrize("seed", range(8))
def test_replayed_log_restores_the_exact_state(core: LoggedCore, tmp_path: Path, seed: int) -> None:
    _live(core, random.Random(seed), 150)
    core.log.flush()
    assert core.lifecycle.ledger.train.reissued > 0
    assert _resumed(tmp_path).snapshot() == core.snapshot()


def test_log_cut_within_a_record_restores_earlier_state(core: LoggedCore, tmp_path: Path) -> None:
    table = _table(core)
    table.hello("actor-0")
    table.ask("actor-0", 4)
    expected = core.snapshot()
    table.ask("actor-0", 4)
    core.log.close()
    (path,) = tmp_path.glob("scheduler.*.log")
    path.write_bytes(path.read_bytes()[:-3])
    assert _resumed(tmp_path).snapshot() == expected


def _say_much(core: LoggedCore) -> Path:
    table = _table(core)
    table.hello("actor-0")
    for _ in range(3):
        table.ask("actor-0", 2)
    core.log.flush()
    return core.log.path


def test_flipped_bit_in_state_or_log_is_refused_by_place(core: LoggedCore, tmp_path: Path) -> None:
    path, rng = _say_much(core), random.Random(1)
    for damaged, where in ((path, r"\.log at offset \d+: "), (tmp_path / "scheduler.json", "json")):
        whole = damaged.read_bytes()
        for bit in rng.sample(range(8 * len(whole)), 60):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            damaged.write_bytes(flipped)
            with pytest.raises(ConfigError, match=f"{where}.*from a backup"):
                _resumed(tmp_path)
        damaged.write_bytes(whole)
    assert _resumed(tmp_path).snapshot() == core.snapshot()


def test_log_with_an_unwritten_end_restores_earlier_state(core: LoggedCore, tmp_path: Path) -> None:
    path = _say_much(core)
    path.write_bytes(path.read_bytes() + bytes(512))  # a machine that lost its power
    assert _resumed(tmp_path).snapshot() == core.snapshot()
    path.unlink()
    with pytest.raises(ConfigError, match=r"scheduler\.1\.log: missing"):
        _resumed(tmp_path)


def test_state_without_checksums_is_accepted(core: LoggedCore, tmp_path: Path) -> None:
    path, state_path = _say_much(core), tmp_path / "scheduler.json"
    state = json.loads(state_path.read_text(encoding="utf-8"))
    del state["checksum"]
    state_path.write_text(json.dumps(state), encoding="utf-8")
    old, content, start = b"", path.read_bytes(), 0
    while start < len(content):
        num_bytes = sum(struct.unpack_from("<II", content, start + 8))
        old += content[start : start + 20] + content[start + 24 : start + 24 + num_bytes]
        start += 24 + num_bytes
    path.write_bytes(old)
    assert _resumed(tmp_path).snapshot() == core.snapshot()


def test_long_log_requests_a_saved_state(core: LoggedCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_EVENTS", 3)
    core.save()
    table = _table(core)
    table.hello("actor-0")
    table.ask("actor-0", 2)
    assert not core.log.is_long
    table.ask("actor-0", 2)
    assert core.log.is_long
    core.save()
    assert not core.log.is_long


def test_save_leaves_one_state_and_one_log(core: LoggedCore, tmp_path: Path) -> None:
    core.save()
    core.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scheduler.3.log", "scheduler.json"]


def test_resume_without_saved_state_starts_empty(tmp_path: Path) -> None:
    clock = LoopClock(0.0)
    core = SchedulerCore(build_components(make_config(), CATALOGUE), clock=clock)
    before = core.snapshot()
    resume(core, clock, EventLog(tmp_path))
    assert core.snapshot() == before


@pytest.mark.parametrize(
    "content",
    [
        *[b"", b'{"log": 1, "state": {"co', b"\0\xff\x80", b"[]", b"5", b'{"log": "a"}'],
        *[b'{"log": 1, "state": []}', b'{"log": 1, "state": {}}'],
        *[b'{"log": 1, "state": {"time_s": 1, "port": 1, "core": {"run": 7}}}'],
        *[b'{"log": 1, "state": {"time_s": [], "port": 1, "core": {}}}'],
    ],
)
def test_damaged_state_is_named_with_remedy(
    core: LoggedCore, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "scheduler.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"scheduler\.json: damaged.*from a backup"):
        _resumed(tmp_path)


def test_failures_count_across_restarts_but_not_across_launches(
    core: LoggedCore, tmp_path: Path
) -> None:
    table = _table(core)
    table.hello("actor-0")
    core.log.save({"core": core.snapshot(with_volatile=True), "time_s": 0.0, "launched_at": 7.0})
    for lease in table.ask("actor-0", 3).leases:
        seen = seen_of(lease, end_reason=EndReason.ENV_ERROR)
        table.report(seen=[replace(seen, error="no such file")])
    core.log.flush()
    restarted = _resumed(tmp_path, launched_at=7.0).lifecycle
    assert list(restarted.failures.causes) == ["env_error"] * 3
    assert [each["num"] for each in restarted.kinds.report()] == [3]
    launched = _resumed(tmp_path, launched_at=8.0).lifecycle
    assert (list(launched.failures.causes), launched.kinds.report()) == ([], [])
