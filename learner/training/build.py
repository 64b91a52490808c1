"""Makes the trainer of a learner: the same on every rank."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from common.config.learning import Advantage
from common.config.run_config import RunConfig
from learner.policy.critic import make_critic
from learner.policy.forward import Networks
from learner.policy.lora import ADAPTER_CONFIG, check_resumable
from learner.policy.model import load_policy
from learner.policy.precision import frozen_dtype
from learner.training.checkpoint import load_checkpoint
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer

logger = logging.getLogger(__name__)


def load_start(
    cfg: RunConfig, checkpoint: Path | None, device: torch.device
) -> tuple[PreTrainedModel, str]:
    """Return the policy to go on with and where it came from: the checkpoint, or `model.path`."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, cfg.learner.num_threads))
    torch.manual_seed(cfg.run.seed)
    lora = cfg.learner.lora
    is_whole = checkpoint is not None and not (checkpoint / ADAPTER_CONFIG).exists()
    path = str(checkpoint) if is_whole else cfg.model.path
    model = load_policy(
        path,
        device=device,
        gradient_checkpointing=cfg.learner.gradient_checkpointing,
        lora=lora,
        base_dtype=frozen_dtype(cfg.learner, device),
    )
    return model, path


def make_trainer(
    cfg: RunConfig, model: PreTrainedModel, checkpoint: Path | None, **links: Any
) -> tuple[Trainer, int]:
    """Return the trainer of a model and the version it stands at; `links` are `Trainer`'s own."""
    settings = TrainerSettings(
        learner=cfg.learner,
        algorithm=cfg.algorithm,
        num_steps=cfg.train.num_steps,
        seed=cfg.run.seed,
        temperature=cfg.actor.temperature,
        engine_dtype=cfg.model.dtype,
        max_ahead_steps=cfg.scheduler.max_ahead_steps,
    )
    critic = None
    if cfg.algorithm.advantage is Advantage.PPO:
        critic = make_critic(cfg.learner.critic, model, policy_path=cfg.model.path)
    reference = _reference(cfg, model)
    networks = Networks(
        policy=model,
        critic=critic,
        reference=reference,
        is_base_reference=cfg.algorithm.kl_coef != 0 and reference is None,
    )
    trainer = Trainer(settings, networks, **links)
    if checkpoint is None:
        return trainer, 0
    check_resumable(checkpoint, model, cfg.learner.lora)
    restored = load_checkpoint(checkpoint)
    trainer.load_state_dict(restored.state)
    logger.info("restored checkpoint=%s version=%d", checkpoint, restored.version)
    return trainer, restored.version


def _reference(cfg: RunConfig, model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the frozen reference policy; it is loaded only if the objective uses it.

    None, too, if it is what the policy is without its adapters.
    """
    path = cfg.algorithm.reference_path
    if cfg.algorithm.kl_coef == 0 or (cfg.learner.lora.rank and path in ("", cfg.model.path)):
        return None
    reference = load_policy(
        path or cfg.model.path, device=next(model.parameters()).device, gradient_checkpointing=False
    )
    reference.requires_grad_(False)
    return reference
