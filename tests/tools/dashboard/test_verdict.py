"""Laws of the verdict on the bottleneck of a run."""

import pytest

from tools.dashboard.verdict import Bottleneck, judge

Line = dict[str, float | None]


def steps(*, wait: float, train: float, slots_busy: float, env: float, num: int = 10) -> list[Line]:
    """Return steps of 10 s with 32 slots, of whose time episodes hold a share."""
    return [
        {
            "step": float(i),
            "time_s": 10.0 * i,
            "wait/batch_s": wait,
            "train/step_s": train,
            "actor/concurrency": 32.0,
            "episodes/arrived": 64.0,
            "episodes/wall_s_mean": 5.0 * slots_busy,
            "episodes/env_s_mean": 5.0 * slots_busy * env,
            "episodes/generate_s_mean": 5.0 * slots_busy * (1.0 - env),
        }
        for i in range(num)
    ]


STAGED = {  # case -> measured, limit, the first knob
    "slow environment": (
        steps(wait=6.0, train=3.5, slots_busy=0.98, env=0.8),
        Bottleneck.ENVIRONMENT,
        "actor.max_concurrent=64",
    ),
    "slow engine": (
        steps(wait=6.0, train=3.5, slots_busy=0.98, env=0.1),
        Bottleneck.ENGINE,
        "actor.num_actors=2",
    ),
    "slow learner": (
        steps(wait=0.1, train=9.5, slots_busy=0.4, env=0.3),
        Bottleneck.LEARNER,
        "learner.num_ranks=2",
    ),
    "gate too tight": (
        steps(wait=5.0, train=4.8, slots_busy=0.4, env=0.3),
        Bottleneck.GATE,
        "scheduler.max_ahead_steps=2",
    ),
}


@pytest.mark.parametrize("case", STAGED)
def test_verdict_names_limit_and_knob_per_case(case: str) -> None:
    lines, bound, knob = STAGED[case]
    config = {"actor": {"num_actors": 1}, "scheduler": {"max_ahead_steps": 1}}
    verdict = judge(lines, config)
    assert verdict.bound == bound
    assert verdict.advice[0].knob == knob
    assert knob in verdict.sentence


@pytest.mark.parametrize("case", STAGED)
def test_malformed_configuration_counts_as_the_default(case: str) -> None:
    lines, bound, _ = STAGED[case]
    keys = ("max_ahead_steps", "max_lag_steps", "num_ranks", "ppo_epochs", "num_actors")
    sections = ("actor", "learner", "scheduler")
    for value in ("z", None, [1], float("nan")):
        config = {section: dict.fromkeys(keys, value) for section in sections}
        assert judge(lines, config).bound == bound
        assert judge(lines, config).advice == judge(lines, {}).advice
    assert judge(lines, {"learner": 3, "actor": "x"}).bound == bound


def test_gain_is_bounded_by_the_next_limit() -> None:
    lines, *_ = STAGED["gate too tight"]
    # The learner works 5 s of each 10 s step, episodes need 4 s of the slots: 5 s would remain.
    lots = {"scheduler": {"max_ahead_steps": 0}}
    assert judge(lines, lots).advice[0].gain == pytest.approx(1.0)
    # With two batches under way, a third is half as much again at most.
    assert judge(lines, {}).advice[0].gain == pytest.approx(0.5)
    lines, *_ = STAGED["slow engine"]
    assert judge(lines, {"actor": {"num_actors": 1}}).advice[0].gain == pytest.approx(1.0)
    assert judge(lines, {"actor": {"num_actors": 3}}).advice[0].gain == pytest.approx(1 / 3)


def test_gain_never_exceeds_the_learner_headroom() -> None:
    lines = steps(wait=2.0, train=7.9, slots_busy=0.98, env=0.1)
    assert judge(lines, {}).advice[0].gain == pytest.approx(0.25)  # 10 s -> its own 8 s


def test_actor_capacity_bounds_the_busy_learner_gain() -> None:
    lines = steps(wait=0.1, train=9.5, slots_busy=0.9, env=0.3)
    assert judge(lines, {}).advice[0].gain == pytest.approx(1 / 0.9 - 1)


def test_sync_mode_has_its_own_verdict() -> None:
    lines, *_ = STAGED["gate too tight"]
    verdict = judge(lines, {"train": {"mode": "sync"}})
    assert (verdict.bound, verdict.advice[0].knob) == (Bottleneck.SYNC, "train.mode=async")


@pytest.mark.parametrize(
    "lines", [[], STAGED["slow engine"][0][:2], [{"step": 1.0}] * 5, [{"time_s": None}] * 5]
)
def test_few_or_old_steps_give_no_verdict(lines: list[Line]) -> None:
    verdict = judge(lines, {})
    assert verdict.bound == Bottleneck.UNKNOWN
    assert "too early" in verdict.sentence
    assert verdict.advice == []


def test_verdict_quotes_the_reason_of_the_gate() -> None:
    lines, *_ = STAGED["gate too tight"]
    assert "4 groups ahead" in judge(lines, {}, {"gate": "4 groups ahead"}).sentence


def on_cores(lines: list[Line], *, cores: float, used: float, engine: float = 0.0) -> list[Line]:
    """Return steps in which the roles use so much of all cores, the engines a part of it."""
    return [
        {
            **line,
            "cpu/cores": cores,
            "cpu/learner_s": (line["time_s"] or 0.0) * cores * (used - engine),
            "cpu/engine_s": (line["time_s"] or 0.0) * cores * engine,
            "cpu/per_trained_episode_s": 1.0,
        }
        for line in lines
    ]


def test_extra_process_advice_requires_idle_cores() -> None:
    config = {"learner": {"ppo_epochs": 4}, "actor": {"num_actors": 1}}
    lines, *_ = STAGED["slow learner"]
    busy = judge(on_cores(lines, cores=2, used=0.95), config)
    assert [each.knob for each in busy.advice] == ["learner.ppo_epochs=2"]
    assert "all 2 cores are busy" in busy.sentence
    idle = judge(on_cores(lines, cores=4, used=0.5), config)
    assert "learner.num_ranks=2" in [each.knob for each in idle.advice]
    lines, *_ = STAGED["slow engine"]
    assert judge(on_cores(lines, cores=2, used=0.95), config).advice == []


def test_gain_never_exceeds_the_idle_core_share() -> None:
    lines, *_ = STAGED["slow engine"]
    (advice,) = judge(on_cores(lines, cores=8, used=0.8), {}).advice
    assert advice.gain == pytest.approx(1 / 0.8 - 1)
    on_gpu = [{**line, "train/is_cuda": 1.0} for line in on_cores(lines, cores=8, used=0.8)]
    assert judge(on_gpu, {}).advice[0].gain == pytest.approx(1.0)


def test_few_slots_grow_before_another_engine_starts() -> None:
    lines, *_ = STAGED["slow engine"]
    config = {"actor": {"max_concurrent": 32}}
    advice = judge(on_cores(lines, cores=2, used=0.95, engine=0.5), config).advice
    assert [each.knob for each in advice] == ["actor.max_concurrent=64"]
    assert advice[0].gain == pytest.approx(1 / 0.7 - 1)  # its own half is halved at most


def test_stale_episodes_indicate_a_tight_lag_bound() -> None:
    lines = steps(wait=5.0, train=4.8, slots_busy=0.9, env=0.3)
    stale: list[Line] = [{**line, "groups/stale_episodes": 16.0} for line in lines]
    verdict = judge(stale, {"learner": {"max_lag_steps": 2}})
    assert (verdict.bound, verdict.advice[0].knob) == (Bottleneck.GATE, "learner.max_lag_steps=3")
    assert verdict.advice[0].gain == pytest.approx(1 / 3)
    assert "25% of the episodes are stale" in verdict.sentence


def test_controller_held_gate_gets_no_bound_advice() -> None:
    lines, *_ = STAGED["gate too tight"]
    held: list[Line] = [{**line, "controller/max_ahead_steps": 0.0} for line in lines]
    assert judge(held, {"scheduler": {"max_ahead_steps": 1}}).advice == []


def beside_others(lines: list[Line], *, used: float) -> list[Line]:
    """Return steps in which other programs use so much of both cores."""
    return [{**line, "cpu/others_s": (line["time_s"] or 0.0) * 2 * used} for line in lines]


def test_external_load_suppresses_advice_for_more_concurrency() -> None:
    slow, *_ = STAGED["slow engine"]
    own = on_cores(slow, cores=2, used=0.4, engine=0.3)
    config = {"actor": {"max_concurrent": 32}}
    alone = judge(beside_others(own, used=0.0), config)
    assert [each.knob for each in alone.advice] == ["actor.max_concurrent=64", "actor.num_actors=2"]
    crowded = judge(beside_others(own, used=0.58), config)
    assert crowded.bound is Bottleneck.ENGINE
    assert crowded.advice == []
    assert "98% of 2 cores are busy, 58% by other programs" in crowded.sentence
    assert "stop other programs" in crowded.sentence
    waits, *_ = STAGED["slow environment"]  # which sleeps: more at once cost little
    slept = beside_others(on_cores(waits, cores=2, used=0.1), used=0.88)
    assert [each.knob for each in judge(slept, {}).advice] == ["actor.max_concurrent=64"]
    (held,) = judge(beside_others(own, used=0.2), {"actor": {"num_actors": 1}}).advice
    assert held.gain == pytest.approx(0.8 / 0.4 - 1)  # what others use stays theirs


def test_verdict_before_first_step_names_current_phase() -> None:
    groups = {"ready": 1, "open": 3}
    status = {"phase": "train", "gate": "gate: 4 groups are ahead of the learner", "groups": groups}
    playing = judge([], {}, {**status, "learner": {"waiting_for": "actors: a batch"}})
    assert playing.sentence.startswith("the actors play the first batch (1 group ready, 3 open)")
    works = judge([], {}, {**status, "learner": {"waiting_for": ""}})
    assert works.sentence.startswith("the learner trains on the first batch; too early")
    assert "ahead" not in playing.sentence + works.sentence
    before = judge([], {}, {**status, "phase": "eval_before"})
    assert before.sentence.startswith("too early")
