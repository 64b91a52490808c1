"""Builds the trainer of a learner, in the same way on every rank."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from common.config.algorithm import Advantage, AlgorithmSection
from common.config.learner import LearnerSection, Offload
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.cgroups import num_cores
from learner.algorithms.user_functions import check_functions, functions_of
from learner.batch.batching import Sample
from learner.policy.composite import set_source, source_of
from learner.policy.forward import Networks
from learner.policy.loading import fill, is_unloaded
from learner.policy.lora import ADAPTER_CONFIG, check_resumable
from learner.policy.model import load_policy, make_critic, pick_device
from learner.policy.precision import frozen_dtype
from learner.policy.weight_files import WeightFiles
from learner.training.checkpoint import TENSORS, load_values
from learner.training.ranks import RankOperation, Ranks
from learner.training.shards import is_whole
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer

logger = logging.getLogger(__name__)


def load_start(
    cfg: RunConfig, checkpoint: Path | None, device: torch.device
) -> tuple[PreTrainedModel, str]:
    """Return the policy to train and its source: the checkpoint, or `model.path`."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, cfg.learner.num_threads))
    elif cfg.learner.offload is Offload.OPTIMIZER:  # The CPU computes the updates.
        own_cores = num_cores() // cfg.learner.local_ranks
        torch.set_num_threads(cfg.learner.num_threads or max(1, own_cores))
    torch.manual_seed(cfg.run.seed)
    path = start_path(cfg, checkpoint)
    model = load_policy(
        path,
        device=device,
        lora=cfg.learner.lora,
        base=cfg.model.base,
        base_dtype=frozen_dtype(cfg.learner, device, engine_dtype=cfg.model.dtype),
        is_skeleton=is_sharded(cfg.learner),
        max_tokens=cfg.actor.max_model_len,
    )
    if source_of(model) is not None:  # A checkpoint of the run may be removed later.
        set_source(model, cfg.model.path)
    if cfg.envhub.style != "auto":  # A saved policy names the prompts of its training.
        model.config.prompt_style = cfg.envhub.style
    return model, path


def start_path(cfg: RunConfig, checkpoint: Path | None) -> str:
    """Return the path of a whole policy that training starts from.

    It is the checkpoint, unless that has only adapters or its weights are on several nodes. The
    trainer then reads the trained weights from the tensors of the checkpoint.
    """
    if checkpoint is None or (checkpoint / ADAPTER_CONFIG).exists() or not is_whole(checkpoint):
        return cfg.model.path
    return str(checkpoint)


def is_sharded(learner: LearnerSection) -> bool:
    """Return whether the learner's weights are sharded, and loaded shard by shard."""
    return learner.num_ranks > 1 or learner.offload is Offload.OPTIMIZER


def make_trainer(
    cfg: RunConfig,
    model: PreTrainedModel,
    checkpoint: Path | None,
    *,
    may_pad: bool = False,
    ranks: Ranks | None = None,
    announce: Callable[[RankOperation], object] | None = None,
    on_bad_batch: Callable[[int, list[Sample]], object] | None = None,
    before_update: Callable[[], object] | None = None,
    profile_folder: Path | None = None,
) -> tuple[Trainer, int]:
    """Return the trainer of a model and its version.

    Args:
        may_pad: switch to padding if packed sequences attend to each other.
        ranks, announce, on_bad_batch, before_update, profile_folder: as of `Trainer`.

    Raises: ConfigError: the learner's scores differ from those of the networks.
    """
    settings = TrainerSettings(
        learner=cfg.learner,
        algorithm=cfg.algorithm,
        num_steps=cfg.train.num_steps,
        seed=cfg.run.seed,
        temperature=cfg.actor.temperature,
        engine_dtype=cfg.model.dtype,
        max_ahead_steps=cfg.scheduler.max_ahead_steps,
        longest_tokens=cfg.actor.max_model_len,
    )
    critic = None
    if cfg.algorithm.advantage is Advantage.PPO:
        critic = make_critic(
            cfg.learner.critic,
            model,
            policy_path=cfg.model.path,
            max_tokens=cfg.actor.max_model_len,
        )
    reference = _reference(cfg, model)
    networks = Networks(
        policy=model,
        critic=critic,
        reference=reference,
        is_base_reference=cfg.algorithm.kl_coef != 0 and reference is None,
    )
    is_skeleton = is_unloaded(model)
    ranks = ranks or Ranks()
    check_functions(cfg.algorithm, pick_device(cfg.learner.device))
    _check_equal_functions(cfg.algorithm, ranks)
    trainer = Trainer(
        settings,
        networks,
        ranks=ranks,
        announce=announce,
        on_bad_batch=on_bad_batch,
        before_update=before_update,
        profile_folder=profile_folder,
    )
    if is_skeleton:
        _fill(cfg, networks, start_path(cfg, checkpoint), ranks.files)
        trainer.take_weights()
    version = 0
    if checkpoint is not None:
        check_resumable(checkpoint, model, cfg.learner.lora)
        values = load_values(checkpoint)
        trainer.restore(checkpoint / TENSORS, values)
        version = values["version"]
        logger.info("restored checkpoint=%s version=%d", checkpoint, version)
    trainer.check_start(may_pad=may_pad)
    return trainer, version


def _check_equal_functions(algorithm: AlgorithmSection, ranks: Ranks) -> None:
    """Check that all ranks, perhaps on several nodes, have equal functions of the user.

    Raises: ConfigError: the file of one differs.
    """
    functions = functions_of(algorithm)
    if not functions:
        return
    digests = ranks.exchange([user.sha256 for user in functions])
    for rank, of_rank in enumerate(digests):
        for user, first, digest in zip(functions, digests[0], of_rank, strict=True):
            if digest != first:
                raise ConfigError(
                    f"{user.where}: the file of rank {rank} differs from that of rank 0; each node"
                    " needs the same file"
                )


def _reference(cfg: RunConfig, model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the frozen reference policy, None if the objective does not use one.

    The result is also None if the reference is the policy without its adapters.
    """
    path = cfg.algorithm.reference_path
    if cfg.algorithm.kl_coef == 0 or (cfg.learner.lora.rank and path in ("", cfg.model.path)):
        return None
    device = pick_device(cfg.learner.device)
    return load_policy(
        path or cfg.model.path,
        device=device,
        base_dtype=frozen_dtype(cfg.learner, device, engine_dtype=cfg.model.dtype),
        is_frozen=True,
        is_skeleton=is_unloaded(model),
        max_tokens=cfg.actor.max_model_len,
    )


def _fill(cfg: RunConfig, networks: Networks, start: str, files: WeightFiles) -> None:
    """Load this rank's shard of weights that have memory, but no values yet."""
    fill(networks.policy, start, files)
    if networks.reference is not None:
        fill(networks.reference, cfg.algorithm.reference_path or cfg.model.path, files)
    if networks.critic is not None and networks.critic.trunk is not None:
        fill(networks.critic.trunk, cfg.learner.critic.path or cfg.model.path, files)
