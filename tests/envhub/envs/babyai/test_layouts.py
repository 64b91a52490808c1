"""Laws of BabyAI's layouts: all are solvable, since unsolvable ones are redrawn."""

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


def test_unsolvable_layout_is_redrawn():
    assert [played_by_expert(item_id) for item_id in LOCKED_AWAY] == [1.0] * 4


def test_unsolvable_layout_is_kept_for_agentgym_layouts():
    env = BabyAiEnv(Style.COMPACT, options=BabyaiOptions(agentgym_layouts=True))
    for item_id in LOCKED_AWAY:
        env.reset(item_id, 0)
        assert env.expert_action() is None
        assert env.fingerprint() != started(item_id).fingerprint()


def test_solvable_layout_equals_minigrids():
    env = BabyAiEnv(Style.COMPACT, options=BabyaiOptions(agentgym_layouts=True))
    for item_id in ("Unlock-test-0", "GoToImpUnlock-train-7", "KeyInBox-test-0", "SynthLoc-test-1"):
        env.reset(item_id, 0)
        assert env.fingerprint() == started(item_id).fingerprint()


def test_redrawn_layout_ignores_the_key_of_the_last_episode():
    env = BabyAiEnv(Style.COMPACT)
    for seed in (0, 4, 7, 15, 16, 37):  # a key of each colour
        env.reset(f"Unlock-train-{seed}", 0)
        while (action := env.expert_action()) is not None:
            env.step(action)
        assert "carrying" in env._observation()
        env.reset("Unlock-train-63", 0)
        assert env.fingerprint() == started("Unlock-train-63").fingerprint()
