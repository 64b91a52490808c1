"""Laws of the critic's network."""

from pathlib import Path
from typing import Any, cast

from common.config.learner import CriticKind, CriticSection
from learner.policy.model import make_critic
from tests.learner.builders import make_model


def test_separate_critic_starts_from_a_checkpoint(tmp_path: Path) -> None:
    policy = make_model()
    policy.save_pretrained(tmp_path)
    cfg = CriticSection(kind=CriticKind.MODEL)
    critic = make_critic(cfg, policy, policy_path=str(tmp_path))
    assert critic.trunk is not None
    own = cast(Any, critic.trunk).get_input_embeddings().weight
    assert own.data_ptr() != cast(Any, policy).get_input_embeddings().weight.data_ptr()
    assert own.equal(cast(Any, policy).get_input_embeddings().weight)
    assert make_critic(CriticSection(), policy, policy_path="").trunk is None
