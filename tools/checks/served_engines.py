"""Engines that a run starts beside its actors: judges, opponents, the teacher."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from actor.seats.engines import KEY_VARIABLE as OPPONENT_KEY
from actor.seats.engines import opponent_role, past_role
from common.config.actor import PAST
from common.config.learner import ShardPlace
from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from common.host.machine import GIB
from common.repository import ROOT
from envhub.envs.dataset.judges.options import KEY_VARIABLE as JUDGE_KEY
from envhub.envs.dataset.judges.options import find_model, role_name
from learner.policy.model_shape import BYTES_OF, ModelShape, read_shape
from learner.teacher.scores import KEY_VARIABLE as TEACHER_KEY
from learner.teacher.scores import TEACHER
from tools.checks.gpu_placement import GpuAssignment, engine_gpus, used_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """An engine that serves one model to other roles of the run."""

    role: str  # Such as "teacher", "judge-style" or "opponent-0".
    folder: Path  # Folder of the model, with its config.json.
    settings: tuple[str, ...]  # Overrides; later ones replace earlier ones.
    section: str  # Section of its keys `serve` and `gpus`.
    key_variable: str  # Environment variable with the key of its endpoint.
    gpus: tuple[int, ...] = ()  # Numbers of GPUs of this machine; () on a machine without.

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings with the model first."""
        return (f"model.path={self.folder}", *self.settings)


MAX_MODEL_LEN = 16_384  # Tokens. A longer context needs more cache than most machines have.
MAX_TURN_TOKENS = 512  # Room for a thought and an action.


def merged_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with each key once; later values replace earlier ones.

    Example: a=1, b=2, a=3 give a=3, b=2. A command line refuses a key that it has twice.
    """
    return list({each.partition("=")[0]: each for each in overrides}.values())


def fitting_overrides(shape: ModelShape) -> list[str]:
    """Return the settings of the engine and of a turn that suit a model.

    Example: 40,960 positions and 28 KiB of cache a token give max_model_len=16384,
    max_turn_tokens=512, and kv_cache_gib=1 for two such episodes at once.
    """
    context = min(shape.context_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN)
    dtype = shape.dtype if shape.dtype in BYTES_OF else "bfloat16"
    cache_gib = max(1, math.ceil(2 * context * shape.kv_bytes_per_token(dtype) / GIB))
    return [
        f"actor.max_model_len={context}",
        f"actor.max_turn_tokens={min(MAX_TURN_TOKENS, context // 4)}",
        f"actor.kv_cache_gib={cache_gib}",
        f"model.dtype={dtype}",
    ]


def own_judges(cfg: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the sections of the judges whose engine the run starts, by name."""
    reward = cfg.envs.dataset.reward
    served = {*(task.env for task in cfg.tasks), *cfg.envhub.envs}
    if "dataset" not in served or not isinstance(reward, dict):
        return {}
    entries = cast("dict[Any, Any]", reward).items()
    sections = {str(n): cast("dict[str, Any]", e) for n, e in entries if isinstance(e, dict)}
    return {name: entry for name, entry in sections.items() if entry.get("path")}


def judge_engines(cfg: RunConfig, *, used: Collection[int], num_gpus: int) -> list[ServedEngine]:
    """Return the engines of the judges of a run, in the order of their names.

    Args:
        used: numbers of the GPUs that other roles use.
        num_gpus: number of this machine's GPUs.

    Raises: ConfigError: the launcher cannot start them, a key is wrong, or no GPU is free.
    """
    judges = own_judges(cfg)
    if judges and cfg.launcher is not Launcher.LOCAL:
        name = next(iter(judges))
        raise ConfigError(
            f"reward.{name}.path={judges[name]['path']}: needs launcher=local. Start the engine"
            f" with `python run.py serve`, and set reward.{name}.url"
        )
    taken = {*used}
    engines: list[ServedEngine] = []
    for name, entry in sorted(judges.items()):
        requested: Any = entry.get("gpus")
        requested = [] if requested is None else requested
        requested = cast("list[Any]", requested) if isinstance(requested, list) else [requested]
        section = f"reward.{name}"
        chosen = engine_gpus(requested, taken, num_gpus, section=section, path=str(entry["path"]))
        taken |= {*chosen}
        folder = find_model(str(entry["path"]))
        engines.append(
            ServedEngine(
                role=role_name(name),
                folder=folder,
                settings=tuple(_judge_settings(name, entry, read_shape(folder))),
                section=section,
                key_variable=JUDGE_KEY,
                gpus=tuple(chosen),
            )
        )
    return engines


def _judge_settings(name: str, entry: Mapping[str, Any], shape: ModelShape) -> list[str]:
    """Return the settings of an engine, the user's last. Raises: ConfigError."""
    serve: Any = entry.get("serve", [])
    key = f"reward.{name}.serve={serve}"
    if not isinstance(serve, list) or not all(
        isinstance(setting, str) and "=" in setting for setting in cast("list[Any]", serve)
    ):
        raise ConfigError(f"{key}: expects a list such as [actor.max_model_len=4096]")
    return [*fitting_overrides(shape), *cast("list[str]", serve)]


def served_engines(
    cfg: RunConfig, *, assignment: GpuAssignment | None = None, num_gpus: int = 0
) -> list[ServedEngine]:
    """Return the engines of judges, of the teacher and of opponents, each with its GPUs.

    Args:
        assignment: GPUs of learner and actors.
        num_gpus: number of this machine's GPUs; 0 runs the engines on its CPU.

    Raises: ConfigError: a key is wrong, no GPU is free, or the launcher cannot start engines.
    """
    used = used_gpus(assignment)
    engines: list[ServedEngine] = []
    for find in (judge_engines, teacher_engines, opponent_engines):
        engines += find(cfg, used=used, num_gpus=num_gpus)
        used |= {gpu for engine in engines for gpu in engine.gpus}
    return engines


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
    for number, (role, (path, *further)) in enumerate(served.items()):
        folder = (ROOT / path).resolve()
        engines.append(
            ServedEngine(
                role=role,
                folder=folder,
                settings=(*_opponent_settings(cfg, folder), *further, *seats.serve),
                section="actor.seats",
                key_variable=OPPONENT_KEY,
                gpus=(places[number],) if places else (),
            )
        )
    return engines


def _gpus(
    requested: Sequence[int], used: Collection[int], num_gpus: int, num_engines: int
) -> Sequence[int]:
    """Return the GPUs of the engines; [] on a machine without GPUs. Raises: ConfigError."""
    if not num_gpus:
        return []
    if wrong := [number for number in requested if number >= num_gpus]:
        raise ConfigError(f"actor.seats.gpus={requested}: this machine has no GPU {wrong[0]}")
    numbers = requested or [i for i in range(num_gpus) if i not in used]
    if len(numbers) < num_engines:
        raise ConfigError(
            f"actor.seats.gpus={requested}: {num_engines} engines of opponents need a GPU each, but"
            f" {len(numbers)} are named or free. Name one for each; a GPU may be shared with"
            " actor.seats.serve=[actor.gpu_memory_frac=0.3]"
        )
    return numbers


def _opponent_settings(cfg: RunConfig, folder: Path) -> list[str]:
    """Return the settings of an opponent's engine: the model's precision, the run's lengths."""
    fitting = fitting_overrides(read_shape(folder))
    return [
        *(each for each in fitting if not each.startswith("actor.max_")),
        f"actor.max_model_len={cfg.actor.max_model_len}",
        f"actor.max_turn_tokens={cfg.actor.max_turn_tokens}",
    ]


SCORING_CONTEXT = 1  # Tokens that an engine needs beyond the longest prompt.
VLLM_MAX_LOGPROBS = 20  # Its default limit of logprobs at a position.


def check_teacher(cfg: RunConfig) -> None:
    """Check that the policy can learn from its teacher. The learner asks the teacher itself later.

    Raises: ConfigError: the message has the key, its value and the remedy.
    """
    teacher = cfg.algorithm.teacher
    if not teacher.is_on:
        return
    if cfg.actor.temperature != 1.0:
        raise ConfigError(
            f"actor.temperature={cfg.actor.temperature:g}: must be 1 with algorithm.teacher, whose"
            " logprobs have temperature 1"
        )
    if not teacher.path:
        return
    if cfg.launcher is not Launcher.LOCAL:
        raise ConfigError(
            f"algorithm.teacher.path={teacher.path}: needs launcher=local. Start the engine with"
            " `python run.py serve`, and set algorithm.teacher.url"
        )
    _check_vocabulary(cfg)
    positions = read_shape(ROOT / teacher.path).context_tokens
    needed = cfg.actor.max_model_len + SCORING_CONTEXT
    if 0 < positions < needed:
        raise ConfigError(
            f"algorithm.teacher.path={teacher.path}: the teacher supports {positions} positions"
            f" (max_position_embeddings). Scoring an episode of actor.max_model_len="
            f"{cfg.actor.max_model_len} needs {needed}. Lower actor.max_model_len"
        )


def _check_vocabulary(cfg: RunConfig) -> None:
    """Compare the vocabularies in tokenizer.json, if both folders have this file."""
    vocabulary = _vocabulary(ROOT / cfg.model.path)
    other = _vocabulary(ROOT / cfg.algorithm.teacher.path)
    if vocabulary is None or other is None or vocabulary == other:
        return
    differing = sorted(vocabulary.items() ^ other.items(), key=lambda each: each[1])
    text, number = differing[0]
    raise ConfigError(
        f"algorithm.teacher.path={cfg.algorithm.teacher.path}: the teacher has another tokenizer"
        f" than the policy. Its vocabulary has {len(other)} tokens, that of"
        f" model.path={cfg.model.path} has {len(vocabulary)}. The first difference is"
        f" token {number}, {text!r:.40}. Choose a teacher with the policy's tokenizer"
    )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the tokens of a tokenizer with their ids; None if the file has another form."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tree = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    tokens: Any = tree.get("model", {}).get("vocab")
    added: list[dict[str, Any]] = tree.get("added_tokens", [])
    if not isinstance(tokens, dict):
        return None
    return cast("dict[str, int]", tokens) | {each["content"]: each["id"] for each in added}


def teacher_engines(cfg: RunConfig, *, used: Collection[int], num_gpus: int) -> list[ServedEngine]:
    """Return the engine of `algorithm.teacher.path`; an empty list without a path.

    Args:
        used: numbers of the GPUs that other roles use.
        num_gpus: number of this machine's GPUs.

    Raises: ConfigError: a number of a GPU is wrong, or no GPU is free.
    """
    teacher = cfg.algorithm.teacher
    if not teacher.path:
        return []
    where = {"section": "algorithm.teacher", "path": teacher.path}
    chosen = engine_gpus(teacher.gpus, used, num_gpus, **where)
    folder = (ROOT / teacher.path).resolve()
    width = [f"actor.tensor_parallel_size={len(chosen)}"] if chosen else []
    return [
        ServedEngine(
            role=TEACHER,
            folder=folder,
            settings=(*width, *_teacher_settings(cfg, folder)),
            section="algorithm.teacher",
            key_variable=TEACHER_KEY,
            gpus=tuple(chosen),
        )
    ]


def _teacher_settings(cfg: RunConfig, folder: Path) -> list[str]:
    """Return the settings of the teacher's engine, the user's last.

    A teacher computes in the dtype of its checkpoint. The policy's own start is computed as the
    policy's engines compute it, so their first version has no distance from the teacher.
    """
    teacher = cfg.algorithm.teacher
    context = cfg.actor.max_model_len + SCORING_CONTEXT
    fitting = [f for f in fitting_overrides(read_shape(folder)) if not f.startswith("actor.max_")]
    if folder == (ROOT / cfg.model.path).resolve():
        fitting = merged_overrides([*fitting, f"model.dtype={cfg.model.dtype}"])
    settings = [
        *fitting,
        f"actor.max_model_len={context}",
        f"actor.max_turn_tokens={min(16, context - 1)}",
        f"actor.turn_timeout_s={max(teacher.timeout_s, 1.0):g}",
    ]
    if teacher.num_top > VLLM_MAX_LOGPROBS:
        settings.append(f"actor.engine_args.max_logprobs={teacher.num_top}")
    return [*settings, *teacher.serve]
