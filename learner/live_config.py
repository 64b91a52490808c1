"""Applies changed values of live keys to a learner, between two steps."""

from collections.abc import Callable
from dataclasses import replace

from common.config.live import changed_values, followed
from common.config.run_config import RunConfig
from learner.build import Learner
from learner.recovery.checksums import Start

SECTIONS = ("learner", "train")
OF_TRAINING = ("learner.lr", "learner.muon_lr", "train.num_steps")  # They change the weights.


def follow(
    cfg: RunConfig, learner: Learner, *, version: int, save: Callable[[], object]
) -> RunConfig:
    """Return the configuration with the scheduler's live values, once the learner uses them.

    A change of the training begins a new section of the checksum log, so that `recompute` uses each
    step's own values. `save` then begins a checkpoint: a restart repeats the steps since the newest
    complete one, and should repeat no step of the earlier values.
    """
    live = learner.intake.live_config
    new = followed(cfg, live, SECTIONS)
    if new is cfg or live is None:
        return cfg
    learner.checkpoints.configure(new.learner)
    if any(key in OF_TRAINING for key in changed_values(cfg, live, SECTIONS)):
        rates = {"lr": new.learner.lr, "muon_lr": new.learner.muon_lr}
        learner.trainer.configure(**rates, num_steps=new.train.num_steps)
        learner.checksums.begin(_start_with(new, learner, rates, version=version))
        save()
    return new


def _start_with(
    cfg: RunConfig, learner: Learner, rates: dict[str, float], *, version: int
) -> Start:
    """Return the record of a start that continues the last one with other rates and another end."""
    last = learner.checksums.last_start
    assert last is not None  # The learner has begun the record at its own start.
    weights, frozen = learner.trainer.checksums()
    settings = last.settings | {
        "learner": last.settings["learner"] | rates,
        "train": {"num_steps": cfg.train.num_steps},
    }
    number = learner.trainer.num_batches
    return replace(
        last, version=version, number=number, weights=weights, frozen=frozen, settings=settings
    )
