"""The presets against the paper (arXiv 2509.08755, appendix B) and its released scripts."""

import pytest

from common.config.algorithm import KlEstimator
from common.config.horizon import HorizonKind
from common.config.load import load_config
from envhub.catalogue.registry import load_spec
from scheduler.curriculum.curriculum import horizon_at

# env: stages, steps per stage, learning rate, rollouts per query, context
PAPER = {
    "textcraft": ((10, 20, 30), 100, 1e-6, 8, 512 + 10240),
    "babyai": ((6, 13, 20), 100, 1e-6, 8, 512 + 8192),
    "sciworld": ((10, 20, 30), 100, 1e-6, 8, 1024 + 8192),
    "searchqa": ((5, 8, 10), 100, 1e-6, 8, 1024 + 8192),
    "webarena": ((8, 12, 15), 80, 5e-7, 4, 750 + 14098),
}


@pytest.mark.parametrize("env", PAPER)
def test_preset_matches_the_paper_hyperparameters(env: str) -> None:
    cfg = load_config(f"{env}-qwen7b", ["model.path=/weights"])
    stages, every_steps, lr, size, max_model_len = PAPER[env]
    policy = cfg.horizon.policy(env)
    assert (policy.kind, policy.stages) == (HorizonKind.STEPWISE, stages)
    assert (policy.every_steps, cfg.learner.lr, cfg.groups.size) == (every_steps, lr, size)
    assert (cfg.algorithm.kl_coef, cfg.algorithm.kl_estimator) == (1e-3, KlEstimator.K3)
    assert (cfg.actor.temperature, cfg.actor.max_model_len) == (1.0, max_model_len)
    assert horizon_at(policy, every_steps - 1).horizon == stages[0]
    assert horizon_at(policy, cfg.train.num_steps - 1).horizon == stages[-1]


@pytest.mark.parametrize("env", PAPER)
def test_preset_names_existing_tasks(env: str) -> None:
    cfg = load_config(f"{env}-qwen7b", ["model.path=/weights"])
    served = "minisites" if env == "webarena" else env  # no address of its sites is set
    spec = load_spec(served, cfg.envs, cfg.env)
    assert {task.env for task in cfg.tasks} == {served}
    assert all(spec.subsets[task.subset].num_train > 0 for task in cfg.tasks)


def test_webarena_preset_uses_webarena_given_site_address() -> None:
    url = "envs.webarena.gitlab=http://10.0.0.1:8023"
    cfg = load_config("webarena-qwen7b", ["model.path=/weights", url])
    assert {task.env for task in cfg.tasks} == {"webarena"}
