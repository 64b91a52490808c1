"""Laws of rewards below zero: a raw score of 0 is a score within the range, not its lower end."""

from typing import Any

import pytest

from envhub.env import Style
from envhub.interop.games import make_spec
from envhub.interop.texts import RewardRule, Rewards

JUDGED = "gymnasium:tests.envhub.interop.little_games:Judged-v0"


@pytest.mark.parametrize(
    ("least", "most", "score"),
    [(0, 1, 0.0), (-1, 1, 0.5), (-20, 0, 1.0), (-20, -1, 1.0), (0.5, 1, 0.0), (-1, 3, 0.25)],
)
def test_start_score_is_raw_zero_in_the_range(least: float, most: float, score: float) -> None:
    rule = RewardRule(least=least, most=most)
    assert rule.start_score == score
    assert Rewards(rule).add(None, is_last=False) == score


def test_unpaid_episode_scores_raw_zero() -> None:
    spec = make_spec(f"{JUDGED}?min_reward=-1&max_reward=1")
    env: Any = spec.make(Style.COMPACT)
    env.reset("all-train-0", 0)
    rewards = [env.step(action).reward for action in ("nonsense", "0", "2")]
    assert (spec.start_score, rewards) == (0.5, [0.5, 0.5, 0.0])


def test_hub_reports_each_sessions_start_score(serve_hub) -> None:
    hub = serve_hub(f"{JUDGED}?min_reward=-1&max_reward=1")
    asked = [{"env": "Judged-v0", "item_id": "all-train-0"}, {"env": "textcraft"}]
    asked[1]["item_id"] = "depth1-train-0"
    alone = [hub.client.post("/v1/sessions", json=each).json() for each in asked]
    together = hub.client.post("/v1/sessions/batch", json=asked).json()
    for answers in (alone, together):
        assert [each["start_score"] for each in answers] == [0.5, 0.0]
