"""The offline training commands `sft`, `dpo`, `evolve` and `merge`."""

import itertools
import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.lock import hold_run
from common.store.run_dir import RunDir
from common.store.run_start import mark_finished, save_config
from learner.journal.metrics import MetricsWriter
from learner.policy.lora import ADAPTER_TENSORS, check_resumable, load_adapter
from learner.trackers import open_trackers
from learner.training.checkpoint import newest_checkpoint
from learner.training.shards import check_whole
from tools.evaluate.evaluate import catalogue_of
from tools.evaluate.own_process import play_given
from tools.launch.hub import command_part, serve_hub
from tools.offline import dpo, evolve, sft
from tools.offline.config import DpoConfig, EvolveConfig, SftConfig
from tools.offline.demonstrate import demonstrate
from tools.offline.scratch import save_policy
from tools.offline.training import Log, load_start

logger = logging.getLogger(__name__)


@contextmanager
def _logged(cfg: RunConfig, run_dir: RunDir, job: str) -> Generator[Log]:
    """Yield a function that logs the metrics of an optimizer step.

    They appear in metrics.jsonl of the command's folder, and in a wandb run of the job. The folder
    is held, and marked as finished at the end.
    """
    with hold_run(run_dir.root, name=f"{run_dir.root.parent.name}/{job}"):
        run_dir.root.mkdir(parents=True, exist_ok=True)
        save_config(cfg, run_dir.config)
        run_dir.finished.unlink(missing_ok=True)
        metrics = MetricsWriter(run_dir, open_trackers(run_dir, cfg, job=job))
        numbers = itertools.count(1)
        try:
            yield lambda values: metrics.log(
                next(numbers), {f"{job}/{k}": v for k, v in values.items()}
            )
        finally:
            metrics.close()
        mark_finished(run_dir, version=next(numbers) - 1, result="")


def make_policy(cfg: SftConfig, run_dir: RunDir) -> int:
    """Train on demonstrations, collected first if none are given; return the exit code."""
    output = cfg.sft.output or str(run_dir.root / "policy")
    cfg = replace(cfg, sft=replace(cfg.sft, output=output))
    cfg, part = command_part(cfg, run_dir, "sft")
    path = Path(cfg.sft.demonstrations)
    if not cfg.sft.demonstrations:
        path = part.demonstrations
        with serve_hub(cfg, part) as (url, token):
            demonstrate(cfg, url, token, path)
    with _logged(cfg, part, "sft") as log:
        print(f"policy: {sft.run(cfg, path, log=log)}")
    return 0


def prefer(cfg: DpoConfig, run_dir: RunDir) -> int:
    """Train on pairs of episodes; return the exit code."""
    output = cfg.dpo.output or str(run_dir.root / "policy")
    cfg, part = command_part(replace(cfg, dpo=replace(cfg.dpo, output=output)), run_dir, "dpo")
    with _logged(cfg, part, "dpo") as log:
        print(f"policy: {dpo.run(cfg, log=log)}")
    return 0


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


def play_and_imitate(cfg: EvolveConfig, run_dir: RunDir) -> int:
    """Play episodes and train on the successful ones, in iterations; return the exit code."""
    output = cfg.evolve.output or str(run_dir.root / "policy")
    cfg, part = command_part(
        replace(cfg, evolve=replace(cfg.evolve, output=output)), run_dir, "evolve"
    )
    with serve_hub(cfg, part) as (url, token):
        catalogue = catalogue_of(cfg, url, token)

        def play_iteration(now: EvolveConfig, iteration: int, folder: Path) -> None:
            play_given(now, evolve.plan_episodes(now, catalogue, iteration), url, token, folder)

        with _logged(cfg, part, "evolve") as log:
            policy = evolve.run(cfg, run_dir.root, play=play_iteration, log=log)
    print(f"policy: {policy}")
    return 0
