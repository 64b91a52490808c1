"""Laws of versions as changes: exact, small, and never the only way to a version."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.config.learner import PublishMode
from common.wire.security import create_keys
from common.wire.sockets import Router
from learner.policy.finite import WeightsNotFinite
from learner.weights.lock import WeightsLock
from learner.weights.publisher import Publisher
from learner.weights.receivers import EngineMember, Membership
from learner.weights.source import LiveWeights, PublishedWeights, VersionKeeper
from learner.weights.transfer import PublishSettings
from tests.learner.weights.keeping_actor import KeepingActor, is_equal
from tests.learner.weights.test_publisher_live import eventually
from tests.learner.weights.toy_actor import HOST

TIMEOUT_S = 20.0
NUM = 64_000  # Numbers of the policy.
SETTINGS = PublishSettings(
    host=HOST, timeout_s=TIMEOUT_S, max_canary_delta=0.05, bucket_bytes=4_096, keeps_versions=True
)


class Bench:
    """A publisher of one fp32 weight vector as bf16, and actors that keep copies."""

    def __init__(self, folder: Path, settings: PublishSettings) -> None:
        self.keys = create_keys(folder / "keys")
        self.weights_lock = WeightsLock(timeout_s=TIMEOUT_S)
        self.publisher = Publisher(
            Router(self.keys, host=HOST, port=0), settings, weights_lock=self.weights_lock
        )
        torch.manual_seed(0)
        self.weight = torch.randn(NUM)
        self.source = LiveWeights([("w", self.weight)], torch.bfloat16)
        self.actors: list[KeepingActor] = []
        self.num_bytes = 0.0  # Bytes that the metrics have counted so far.
        self.publisher.start()

    def start(self, name: str, *, habit: str = "", num_workers: int = 1) -> KeepingActor:
        actor = KeepingActor(
            self.keys, self.publisher.port, name, habit=habit, num_workers=num_workers
        )
        self.actors.append(actor)
        actor.start()
        return actor

    def publish(self, version: int) -> Tensor:
        """Publish the weights until the engines have them; return them as sent."""
        weights = PublishedWeights(version=version, source=self.source)
        assert self.publisher.publish(weights)
        return self.weight.to(torch.bfloat16)

    def step(self, num_changed: int = NUM // 100) -> None:
        """Change the first numbers, as an optimizer does between two versions."""
        self.weights_lock.close()
        self.weight[:num_changed] *= -1.5

    def count_bytes(self) -> float:
        """Return all bytes sent so far; a transfer is counted after its actors have loaded."""
        self.num_bytes += self.publisher.drain_metrics().get("publish/bytes", 0.0)
        return self.num_bytes

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop()
        self.publisher.stop()
        assert not self.publisher.is_alive()


@contextmanager
def bench_of(root: Path, **settings: object) -> Iterator[Bench]:
    bench = Bench(root, replace(SETTINGS, **settings))  # type: ignore[arg-type]
    try:
        yield bench
    finally:
        bench.stop()


def test_workers_with_the_version_before_receive_delta(tmp_path: Path) -> None:
    with bench_of(tmp_path) as bench:
        bench.publish(0)
        actors = [bench.start(f"tp-{n}", num_workers=n) for n in (1, 2)]
        for actor in actors:
            actor.wait_for(0)
        assert eventually(lambda: bench.count_bytes() == 3 * 2 * NUM), "bf16 to three workers"
        for version in (1, 2):
            bench.step()
            sent = bench.publish(version)
            for actor in actors:
                assert is_equal(actor.tensors[version], sent)
        assert [actor.bases for actor in actors] == [[(0, -1), (1, 0), (2, 1)]] * 2
        changed = actors[0].offers[-1].total_bytes
        # 640 changed numbers: 16,000 words of 8 bytes, 160 codes, 640 values, and the header.
        assert changed == 16 + 16_000 // 8 + 160 + 2 * 640
        metrics = bench.publisher.drain_metrics()
        assert metrics["publish/bytes"] == 2 * 3 * changed, "two versions to three workers"
        assert metrics["publish/changed_frac"] == 0.01


def test_late_joiner_and_engine_that_missed_a_version_get_it_whole(tmp_path: Path) -> None:
    with bench_of(tmp_path) as bench:
        bench.publish(0)
        steady = bench.start("steady")
        absent = bench.start("absent")
        for actor in (steady, absent):
            actor.wait_for(0)
        bench.publisher.mark_silent(["absent-1"])
        bench.step()
        bench.publish(1)
        bench.step()
        late = bench.start("late")
        late.wait_for(1)
        sent = bench.publish(2)
        bench.publisher.mark_silent([])
        absent.wait_for(2)
        assert steady.bases == [(0, -1), (1, 0), (2, 1)]
        assert late.bases == [(1, -1), (2, 1)]
        assert absent.bases == [(0, -1), (2, -1)]
        for actor in (steady, absent, late):
            assert is_equal(actor.tensors[2], sent)


@pytest.mark.parametrize("fault", ["damaged", "lost"])
def test_worker_without_the_exact_copy_gets_the_whole_version(tmp_path: Path, fault: str) -> None:
    with bench_of(tmp_path) as bench:
        bench.publish(0)
        bad = bench.start("bad", num_workers=2)
        good = bench.start("good")
        for actor in (bad, good):
            actor.wait_for(0)
        if fault == "damaged":
            bad.damage_copy(worker=1)
        else:
            bad.free_copy(worker=1)
        bench.step()
        sent = bench.publish(1)
        assert bad.bases[-1] == (1, -1)
        assert is_equal(bad.tensors[1], sent)
        assert is_equal(good.tensors[1], sent)
        assert set(bad.loaded) == set(good.loaded) == {0, 1}
        assert {base for _, base in good.bases} == {-1, 0}
        bench.step()
        sent = bench.publish(2)
        assert bad.bases[-1] == good.bases[-1] == (2, 1), "it is trusted again"
        assert is_equal(bad.tensors[2], sent)


def test_dense_changes_are_sent_as_the_whole_version(tmp_path: Path) -> None:
    with bench_of(tmp_path) as bench:
        bench.publish(0)
        actor = bench.start("a")
        actor.wait_for(0)
        bench.step(num_changed=NUM)
        dense = bench.publish(1)
        bench.step()
        sparse = bench.publish(2)
        assert actor.bases == [(0, -1), (1, -1), (2, 1)]
        assert is_equal(actor.tensors[1], dense)
        assert is_equal(actor.tensors[2], sparse)


@pytest.mark.slow
def test_update_waits_for_the_copy_and_not_for_engines(tmp_path: Path) -> None:
    with bench_of(tmp_path, silent_after_s=2.0) as bench:
        bench.publish(0)
        slow = bench.start("slow", habit="busy")
        good = bench.start("good")
        for actor in (slow, good):
            assert eventually(lambda actor=actor: 0 in actor.loaded)
        before = bench.weight.to(torch.bfloat16)
        assert bench.publisher.begin(PublishedWeights(version=1, source=bench.source))
        stepping = threading.Thread(target=bench.step, daemon=True)
        stepping.start()
        stepping.join(TIMEOUT_S)
        assert not stepping.is_alive()
        assert good.loaded == [0], "the transfer waits for the slow engine"
        assert good.wait_for(1)
        assert is_equal(good.tensors[1], before)


def test_non_finite_changes_are_not_sent_and_end_the_run(tmp_path: Path) -> None:
    with bench_of(tmp_path) as bench:
        bench.publish(0)
        actor = bench.start("a")
        actor.wait_for(0)
        bench.step()
        bench.weight[-1] = float("nan")
        assert bench.publisher.begin(PublishedWeights(version=1, source=bench.source))
        with pytest.raises(WeightsNotFinite, match="w has NaN or infinite values"):
            bench.publisher.wait_done()
        assert actor.loaded == [0]


def test_engine_that_was_slow_to_load_gets_changes_again() -> None:
    members = Membership()
    slow = EngineMember(sender=b"s", actor="a", incarnation="i", devices=("",))
    members.hear(slow, version=-1, current_version=3)
    members.note_loading(slow, held_after=3)
    members.hear(slow, version=2, current_version=3, is_free=False)
    assert members.held(slow) == -1
    members.hear(slow, version=3, current_version=3)
    assert members.held(slow) == 3
    members.note_slept(slow, 7)
    assert members.held(slow) == -1, "a sleeping engine has freed its copy"


@pytest.mark.parametrize(
    ("dtype", "has_adapters", "is_sleeping", "keeps"),
    [
        ("bfloat16", False, False, True),
        ("float16", False, False, True),
        ("float32", False, False, False),
        ("bfloat16", True, False, False),
        ("bfloat16", False, True, False),
    ],
)
def test_auto_keeps_versions_where_changes_are_sparse(
    dtype: str, has_adapters: bool, is_sleeping: bool, keeps: bool
) -> None:
    options = {"has_adapters": has_adapters, "is_sleeping": is_sleeping}
    assert PublishMode.AUTO.keeps_versions(dtype, **options) == keeps
    assert PublishMode.DELTA.keeps_versions(dtype, **options)
    assert not PublishMode.FULL.keeps_versions(dtype, **options)


def test_restarted_learner_sends_its_first_version_whole() -> None:
    weight = torch.zeros(1_000)
    weights = PublishedWeights(version=7, source=LiveWeights([("w", weight)], torch.bfloat16))
    first = VersionKeeper()
    first.keep(weights)
    weight[3] = 1.0
    assert first.keep(replace(weights, version=8)).delta is not None
    kept = VersionKeeper().keep(replace(weights, version=8))
    assert kept.delta is None
    assert kept.whole.base == -1
    assert kept.whole.digest == first.keep(replace(weights, version=9)).whole.digest
