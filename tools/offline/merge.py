"""Merging: the newest adapters of a run, in their base, as a plain policy."""

from dataclasses import replace

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import RunDir
from learner.policy.lora import ADAPTER_TENSORS, check_resumable, load_adapter
from learner.training.checkpoint import newest_checkpoint
from learner.training.shards import check_whole
from tools.offline.scratch import save_policy
from tools.offline.training import load_start


def merge(cfg: RunConfig, run_dir: RunDir) -> int:
    """Write the newest adapters of a run, merged into their base; return the exit code.

    Raises: ConfigError: the run has no checkpoint of adapters, or the base model is missing.
    """
    checkpoint = newest_checkpoint(run_dir.checkpoints)
    if checkpoint is not None:
        check_whole(checkpoint, key="run.name", shown=cfg.run.name)
    if checkpoint is None or not (checkpoint / ADAPTER_TENSORS).exists():
        raise ConfigError(
            f"run.name={cfg.run.name}: {run_dir.checkpoints} has no checkpoint with adapters. Train"
            " the run with learner.lora.rank above 0 first."
        )
    model, tokenizer = load_start(cfg.model.path, replace(cfg.learner, device="cpu"))
    check_resumable(checkpoint, model, cfg.learner.lora)
    load_adapter(model, checkpoint)
    print(f"policy: {save_policy(run_dir.root / 'policy', model, tokenizer)}")
    return 0
