"""Engines of opponents: model folders in `actor.seats`, and past versions of the policy."""

from collections.abc import Collection, Sequence
from pathlib import Path

from actor.seats.engines import KEY_VARIABLE, opponent_role, past_role
from common.config.actor import PAST
from common.config.learner import ShardPlace
from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from learner.policy.model_shape import read_shape
from tools.checks.fitting import fitting_overrides
from tools.checks.served.engine import ServedEngine


def opponent_engines(
    cfg: RunConfig, *, used: Collection[int] = (), num_gpus: int = 0, in_training: bool = True
) -> list[ServedEngine]:
    """Return the engines of a run's opponents.

    Args:
        used: numbers of the GPUs that other roles use.
        num_gpus: number of this machine's GPUs.
        in_training: whether the opponents of training play, too.

    Raises: ConfigError: no model at a folder, no free GPU, or the launcher cannot start engines.
    """
    seats = cfg.actor.seats
    every = seats.folders()
    served = {opponent_role(every.index(n)): [n] for n in seats.folders(in_training=in_training)}
    if in_training and PAST in seats.opponents:
        if cfg.learner.num_nodes > 1 and cfg.learner.checkpoint_shards is ShardPlace.OWN_NODE:
            raise ConfigError(
                "learner.checkpoint_shards=own_node: actor.seats.opponents has checkpoints, which"
                " must be whole. Use first_node"
            )
        past = [cfg.model.path, f"policy.past_every_s={seats.past_every_s:g}"]
        served |= {past_role(number): past for number in range(seats.num_past)}
    if served and cfg.launcher is not Launcher.LOCAL:
        raise ConfigError(
            f"actor.seats.opponents={seats.opponents}: engines of opponents need launcher=local."
            " Start one with `python run.py serve`, and use the opponent url with actor.seats.url"
        )
    places = _gpus(seats.gpus, used, num_gpus, len(served))
    engines: list[ServedEngine] = []
    for number, (role, (path, *more)) in enumerate(served.items()):
        folder = (ROOT / path).resolve()
        engines.append(
            ServedEngine(
                role=role,
                folder=folder,
                settings=(*_settings(cfg, folder), *more, *seats.serve),
                section="actor.seats",
                key_variable=KEY_VARIABLE,
                gpus=(places[number],) if places else (),
            )
        )
    return engines


def _gpus(
    given: Sequence[int], used: Collection[int], num_gpus: int, num_engines: int
) -> Sequence[int]:
    """Return the GPUs of the engines; [] on a machine without GPUs. Raises: ConfigError."""
    if not num_gpus:
        return []
    if wrong := [number for number in given if number >= num_gpus]:
        raise ConfigError(f"actor.seats.gpus={given}: this machine has no GPU {wrong[0]}")
    numbers = given or [i for i in range(num_gpus) if i not in used]
    if len(numbers) < num_engines:
        raise ConfigError(
            f"actor.seats.gpus={given}: {num_engines} engines of opponents need a GPU each, but"
            f" {len(numbers)} are named or free. Name one for each; a GPU may be shared with"
            " actor.seats.serve=[actor.gpu_memory_frac=0.3]"
        )
    return numbers


def _settings(cfg: RunConfig, folder: Path) -> list[str]:
    """Return the settings of an opponent's engine: the model's precision, the run's lengths."""
    fitting = fitting_overrides(read_shape(folder))
    return [
        *(each for each in fitting if not each.startswith("actor.max_")),
        f"actor.max_model_len={cfg.actor.max_model_len}",
        f"actor.max_turn_tokens={cfg.actor.max_turn_tokens}",
    ]
