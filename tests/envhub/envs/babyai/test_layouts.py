"""Laws of BabyAI's layouts: whoever plays can solve them, and the others are drawn anew."""

from common.config.envs import BabyaiOptions
from envhub.env import Style
from envhub.envs.babyai.episode import BabyAiEnv
from tests.envhub.envs.babyai.test_env import played_by_expert, started

LOCKED_AWAY = (
    "Unlock-test-12",
    "Unlock-train-63",
    "GoToImpUnlock-train-6",
    "GoToImpUnlock-test-44",
)


def test_layout_that_nobody_could_solve_is_drawn_anew():
    assert [played_by_expert(item_id) for item_id in LOCKED_AWAY] == [1.0] * 4


def test_layout_that_nobody_can_solve_is_kept_when_agentgyms_are_asked_for():
    env = BabyAiEnv(Style.COMPACT, options=BabyaiOptions(agentgym_layouts=True))
    for item_id in LOCKED_AWAY:
        env.reset(item_id, 0)
        assert env.expert_action() is None
        assert env.fingerprint() != started(item_id).fingerprint()


def test_layout_that_can_be_solved_is_minigrids_own():
    env = BabyAiEnv(Style.COMPACT, options=BabyaiOptions(agentgym_layouts=True))
    for item_id in ("Unlock-test-0", "GoToImpUnlock-train-7", "KeyInBox-test-0", "SynthLoc-test-1"):
        env.reset(item_id, 0)
        assert env.fingerprint() == started(item_id).fingerprint()


def test_layout_drawn_anew_is_the_same_after_an_episode_that_ended_with_any_key_in_hand():
    env = BabyAiEnv(Style.COMPACT)
    for seed in (0, 4, 7, 15, 16, 37):  # a key of each colour
        env.reset(f"Unlock-train-{seed}", 0)
        while (action := env.expert_action()) is not None:
            env.step(action)
        assert "carrying" in env._observation()
        env.reset("Unlock-train-63", 0)
        assert env.fingerprint() == started("Unlock-train-63").fingerprint()
