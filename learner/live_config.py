"""Applies changed values of live keys to a learner, between two steps."""

from collections.abc import Callable

from common.config.live.keys import changed_values, followed, text_at, with_values
from common.config.run_config import RunConfig
from learner.build import Learner
from learner.recovery.checksums import start_of

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
    if any(text_at(cfg, key) != text_at(new, key) for key in OF_TRAINING):
        trainer = learner.trainer
        rates = {"lr": new.learner.lr, "muon_lr": new.learner.muon_lr}
        trainer.configure(**rates, num_steps=new.train.num_steps)
        settled = with_values(learner.settled, changed_values(learner.settled, live, SECTIONS))
        start = start_of(settled, learner.run_dir, trainer, version=version)
        learner.checksums.begin(start)
        save()
    return new
