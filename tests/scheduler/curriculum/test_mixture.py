"""Which item a group gets when the mixture is tempered or adaptive."""

import json
from collections import Counter

import pytest

from common.config.mixture import MixtureKind, MixtureSection
from common.config.tasks import TaskSection
from common.wire.messages import EndReason, EpisodeSeen
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.mixture import MIN_TASK_EPISODES, Mixture, temper
from scheduler.curriculum.sampling import Item, Sampler
from scheduler.curriculum.success import SuccessPool, worth
from scheduler.state import restore, save
from tests.scheduler.builders import catalogue_of, tasks_of

ADAPTIVE = MixtureSection(kind=MixtureKind.ADAPTIVE, floor=0.1, memory_episodes=1000)


def make_mixture(
    cfg: MixtureSection, tasks: list[TaskSection], catalogue: HubCatalogue, *, seed: int = 3
) -> Mixture:
    return Mixture(cfg, tasks, catalogue, seed=seed, group_size=4)


def seen(*, is_success: bool) -> EpisodeSeen:
    return EpisodeSeen(
        episode_id="g0/0",
        reward=float(is_success),
        is_success=is_success,
        end_reason=EndReason.DONE,
        num_turns=1,
        wall_s=1.0,
    )


def tell(mixture: Mixture, subset: str, item_id: str, *, is_success: bool, num: int = 1) -> None:
    episode = seen(is_success=is_success)
    for _ in range(num):
        mixture.see(episode, Item(env="maze", subset=subset, item_id=item_id))


def test_worth_peaks_at_one_half_and_has_a_floor() -> None:
    cases = {0.5: 1.0, 0.25: 0.75, 0.9: 0.36, 0.95: 0.19, 0.0: 0.1, 1.0: 0.1}
    assert {p: worth(p, floor=0.1) for p in cases} == pytest.approx(cases)


def test_pool_averages_all_episodes_first_and_then_forgets() -> None:
    pool = SuccessPool(memory_episodes=4, max_keys=2)
    for is_success in (True, False, True, True):
        pool.add("a", seen(is_success=is_success))
    assert pool.success("a") == pytest.approx(0.75)
    pool.add("a", seen(is_success=False))  # 0.75 - 0.75 / 4
    assert pool.success("a") == pytest.approx(0.5625)
    assert pool.success("a", min_episodes=6) is None
    pool.add("b", seen(is_success=True))
    pool.add("a", seen(is_success=True))
    pool.add("c", seen(is_success=True))  # b has the oldest report.
    assert (pool.success("b"), pool.success("c")) == (None, 1.0)


def test_weights_mixture_draws_like_the_sampler() -> None:
    tasks, catalogue = tasks_of(a=1, b=3), catalogue_of(a=20, b=20)
    mixture = make_mixture(MixtureSection(), tasks, catalogue)
    sampler = Sampler(tasks, catalogue, seed=3)
    assert [mixture.item(n) for n in range(50)] == [sampler.item(n) for n in range(50)]


def test_temper_raises_weights_to_one_over_the_temperature() -> None:
    # At T = 2 the weights 1 and 9 become 1 and 3.
    weights = [task.weight for task in temper(tasks_of(a=1, b=9, c=0), 2.0)]
    assert weights == pytest.approx([0.25, 0.75, 0.0])
    # A high temperature makes the weights equal, a low one favours the largest.
    assert temper(tasks_of(a=1, b=9), 1e6)[0].weight == pytest.approx(0.5, abs=1e-5)
    assert temper(tasks_of(a=1, b=9), 0.01)[1].weight == pytest.approx(1.0)


def test_temperature_mixture_keeps_the_tempered_shares() -> None:
    cfg = MixtureSection(kind=MixtureKind.TEMPERATURE, temperature=2.0)
    mixture = make_mixture(cfg, tasks_of(a=1, b=9), catalogue_of(a=50, b=50))
    counts = Counter(mixture.item(number).subset for number in range(400))
    assert counts["a"] == pytest.approx(100, abs=4)


def test_adaptive_mixture_starts_with_the_weights() -> None:
    mixture = make_mixture(ADAPTIVE, tasks_of(a=1, b=3), catalogue_of(a=50, b=50))
    assert mixture.shares() == {"maze/a": 0.25, "maze/b": 0.75}
    counts = Counter(mixture.item(number).subset for number in range(400))
    assert counts["a"] == pytest.approx(100, abs=4)


def test_adaptive_mixture_prefers_middling_tasks() -> None:
    mixture = make_mixture(ADAPTIVE, tasks_of(a=1, b=1, c=1), catalogue_of(a=50, b=50, c=50))
    for i in range(MIN_TASK_EPISODES):
        tell(mixture, "a", f"a-train-{i}", is_success=i % 2 == 0)  # 0.5: worth 1
        tell(mixture, "b", f"b-train-{i}", is_success=i % 4 == 0)  # 0.25: worth 0.75
        tell(mixture, "c", f"c-train-{i}", is_success=False)  # 0: worth the floor
    total = 1.85
    expected = {"maze/a": 1 / total, "maze/b": 0.75 / total, "maze/c": 0.1 / total}
    assert mixture.shares() == pytest.approx(expected)
    counts = Counter(mixture.item(number).subset for number in range(1000))
    for name in "abc":
        assert counts[name] == pytest.approx(1000 * expected[f"maze/{name}"], abs=25)


def test_adaptive_mixture_needs_minimum_of_episodes() -> None:
    mixture = make_mixture(ADAPTIVE, tasks_of(a=1, b=1), catalogue_of(a=50, b=50))
    tell(mixture, "a", "a-train-0", is_success=False, num=MIN_TASK_EPISODES - 1)
    assert mixture.shares()["maze/a"] == 0.5
    tell(mixture, "a", "a-train-0", is_success=False)
    assert mixture.shares()["maze/a"] == pytest.approx(0.1 / 1.1)


def test_adaptive_mixture_draws_each_item_once_per_epoch() -> None:
    mixture = make_mixture(ADAPTIVE, tasks_of(a=1), catalogue_of(a=30))
    for epoch in range(3):
        drawn = [mixture.item(epoch * 30 + i).item_id for i in range(30)]
        assert len(set(drawn)) == 30


def test_adaptive_mixture_mostly_skips_items_without_signal() -> None:
    mixture = make_mixture(ADAPTIVE, tasks_of(a=1), catalogue_of(a=100))
    for i in range(100):
        is_learnable = i < 50
        tell(mixture, "a", f"a-train-{i}", is_success=True, num=4)
        tell(mixture, "a", f"a-train-{i}", is_success=not is_learnable, num=4)
    drawn = [int(mixture.item(number).item_id.rpartition("-")[2]) for number in range(550)]
    # an epoch has 50 items worth 1 and 50 worth 0.1: ten epochs hold 500 and about 50
    assert sum(i >= 50 for i in drawn) == pytest.approx(50, abs=20)
    assert min(Counter(i for i in drawn if i < 50).values()) >= 9
    mixture.forget_items({"maze/a"})
    drawn = [int(mixture.item(number).item_id.rpartition("-")[2]) for number in range(550, 650)]
    assert sum(i >= 50 for i in drawn) > 40


def test_success_is_forgotten_for_the_given_subsets_only() -> None:
    items = {"a": "a-train-0", "a-b": "a-b-train-0", "c": "c@1..4-train-0"}
    catalogue = catalogue_of(**dict.fromkeys(items, 9))

    def remaining(subset: str) -> list[str]:
        mixture = make_mixture(ADAPTIVE, tasks_of(**dict.fromkeys(items, 1)), catalogue)
        for name, item_id in items.items():
            tell(mixture, name, item_id, is_success=True)
        mixture.forget_items({f"maze/{subset}"})
        return [key.partition("/")[2] for key in mixture.item_success.known]

    assert remaining("a") == ["a-b-train-0", "c@1..4-train-0"]
    assert remaining("c") == ["a-train-0", "a-b-train-0"]


def test_adaptive_mixture_still_draws_when_all_items_are_solved() -> None:
    mixture = make_mixture(ADAPTIVE, tasks_of(a=1), catalogue_of(a=3))
    for i in range(3):
        tell(mixture, "a", f"a-train-{i}", is_success=True, num=8)
    assert {mixture.item(number).item_id for number in range(40)} == {
        "a-train-0",
        "a-train-1",
        "a-train-2",
    }


def test_restored_adaptive_mixture_continues_its_draws() -> None:
    def play(mixture: Mixture, numbers: range) -> list[Item]:
        items: list[Item] = []
        for number in numbers:
            item = mixture.item(number)
            tell(mixture, item.subset, item.item_id, is_success=number % 3 == 0, num=4)
            items.append(item)
        return items

    def build() -> Mixture:
        return make_mixture(ADAPTIVE, tasks_of(a=1, b=2), catalogue_of(a=10, b=40))

    whole, first, second = build(), build(), build()
    expected = play(whole, range(120))
    before = play(first, range(70))
    restore(second, json.loads(json.dumps(save(first))))
    assert before + play(second, range(70, 120)) == expected
    assert save(second) == save(whole)
