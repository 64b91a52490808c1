"""Laws of the running means over episodes."""

from dataclasses import replace

import pytest

from common.wire.messages import EndReason
from learner.ingest.episode_stats import EpisodeStats, horizon_mix, subset_of
from tests.learner.builders import make_trajectory

WON = replace(
    make_trajectory([1, 2, 3, 4], [0, 1, 1, 0]),
    item_id="GoTo-Local-train-3",
    num_turns=2,
    generate_s=1.0,
    env_s=0.5,
    wall_s=2.0,
    num_prompt_tokens=30,
    num_cached_tokens=10,
)
LOST = replace(
    make_trajectory([1, 2], [0, 1]),
    item_id="depth2-train-1",
    reward=0.0,
    is_success=False,
    end_reason=EndReason.HORIZON,
    num_turns=4,
    num_invalid_actions=3,
    num_prompt_tokens=10,
    num_cached_tokens=10,
)


def test_a_subset_may_hold_dashes() -> None:
    assert subset_of("GoTo-Local-train-17") == "GoTo-Local"


def test_metrics_of_environments_are_means_of_their_episodes() -> None:
    stats = EpisodeStats()
    stats.add(replace(WON, metrics={"reward_style": 0.5}))
    stats.add(replace(WON, metrics={"reward_style": 0.25}))
    stats.add(LOST)  # Its environment reports none.
    assert stats.metrics(elapsed_s=1.0)["episodes/reward_style_mean"] == 0.375


def test_means_are_over_episodes_and_invalid_over_turns() -> None:
    stats = EpisodeStats()
    stats.add(WON)
    stats.add(LOST)
    metrics = stats.metrics(elapsed_s=2.0)
    expected = {
        "episodes/arrived": 2,
        "episodes/failed": 0,
        "actor/episodes_per_s": 1.0,
        "actor/tokens_per_s": 1.5,
        "actor/prefix_hit_frac": 0.5,
        "reward/mean": 0.5,
        "reward/success": 0.5,
        "episodes/turns_mean": 3.0,
        "episodes/truncated_frac": 0.5,
        "episodes/context_full_frac": 0.0,
        "episodes/cut_observations_mean": 0.0,
        "episodes/repaired_texts_mean": 0.0,
        "episodes/invalid_frac": 0.5,
        "episodes/tokens_mean": 3.0,
        "episodes/segments_mean": 1.0,
        "episodes/forks_frac": 0.0,
        "episodes/shared_turns_mean": 0.0,
        "episodes/generate_s_mean": 0.5,
        "episodes/env_s_mean": 0.25,
        "episodes/wall_s_mean": 1.0,
    }
    of_tasks = {name: value for name, value in metrics.items() if name.startswith("tasks/")}
    assert {name: metrics[name] for name in metrics.keys() - of_tasks} == pytest.approx(expected)


def test_episode_cut_by_its_environment_counts_as_truncated() -> None:
    stats = EpisodeStats()
    stats.add(replace(LOST, end_reason=EndReason.TRUNCATED))
    stats.add(replace(LOST, end_reason=EndReason.DONE))
    assert stats.metrics(elapsed_s=1.0)["episodes/truncated_frac"] == 0.5


def test_every_task_is_counted_under_its_environment() -> None:
    stats = EpisodeStats()
    for trajectory in (WON, LOST, replace(LOST, env="shop"), replace(WON, env="shop")):
        stats.add(trajectory)
    stats.add(replace(LOST, env="shop", end_reason=EndReason.CONTEXT_FULL))
    metrics = stats.metrics(elapsed_s=2.0)
    env = WON.env
    expected = {
        f"tasks/episodes/{env}": 2.0,
        f"tasks/success/{env}": 0.5,
        f"tasks/truncated_frac/{env}": 0.5,
        f"tasks/truncated_frac/{env}/GoTo-Local": 0.0,
        "tasks/episodes/shop": 3.0,
        "tasks/episodes/shop/depth2": 2.0,
        "tasks/success/shop/depth2": 0.0,
        "tasks/truncated_frac/shop/depth2": 0.5,
        "tasks/truncated_frac/shop": pytest.approx(1 / 3),
    }
    assert {name: metrics[name] for name in expected} == expected


def test_horizon_mix_reports_share_of_each() -> None:
    members = [replace(WON, env="maze", horizon=5, horizon_stage=0)] * 3
    members += [replace(WON, env="shop", horizon=20, horizon_stage=2)]
    assert horizon_mix(members) == {
        "horizon/value": 20.0,
        "horizon/mean": 8.75,
        "horizon/stage": 2.0,
        "horizon/share/5": 0.75,
        "horizon/share/20": 0.25,
        "horizon/value/maze": 5.0,
        "horizon/stage/maze": 0.0,
        "horizon/value/shop": 20.0,
        "horizon/stage/shop": 2.0,
    }


def test_infrastructure_failure_counts_outside_the_means() -> None:
    stats = EpisodeStats()
    stats.add(WON)
    stats.add(replace(LOST, end_reason=EndReason.ENV_TIMEOUT))
    metrics = stats.metrics(elapsed_s=1.0)
    assert metrics["episodes/failed"] == 1
    assert metrics["reward/mean"] == 1.0


def test_a_window_without_episodes_has_no_means() -> None:
    assert set(EpisodeStats().metrics(elapsed_s=1.0).values()) == {0.0}
