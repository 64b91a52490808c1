"""Checks of `algorithm.teacher` before a run starts, and its engine."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from learner.policy.model_shape import ModelShape, read_shape
from learner.teacher.scores import KEY_VARIABLE, TEACHER
from tools.checks.fitting import fitting_overrides
from tools.checks.gpu_placement import engine_gpus
from tools.checks.served.engine import ServedEngine

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
    known = read_shape(ROOT / teacher.path).context_tokens
    needed = cfg.actor.max_model_len + SCORING_CONTEXT
    if 0 < known < needed:
        raise ConfigError(
            f"algorithm.teacher.path={teacher.path}: the teacher supports {known} positions"
            f" (max_position_embeddings). Scoring an episode of actor.max_model_len="
            f"{cfg.actor.max_model_len} needs {needed}. Lower actor.max_model_len"
        )


def _check_vocabulary(cfg: RunConfig) -> None:
    """Compare the vocabularies in tokenizer.json, if both folders have this file."""
    own = _vocabulary(ROOT / cfg.model.path)
    other = _vocabulary(ROOT / cfg.algorithm.teacher.path)
    if own is None or other is None or own == other:
        return
    differing = sorted(own.items() ^ other.items(), key=lambda each: each[1])
    text, number = differing[0]
    raise ConfigError(
        f"algorithm.teacher.path={cfg.algorithm.teacher.path}: the teacher has another tokenizer"
        f" than the policy. Its vocabulary has {len(other)} tokens, that of"
        f" model.path={cfg.model.path} has {len(own)}. The first difference is token {number},"
        f" {text!r:.40}. Choose a teacher with the policy's tokenizer"
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
            settings=(*width, *_settings(cfg, read_shape(folder))),
            section="algorithm.teacher",
            key_variable=KEY_VARIABLE,
            gpus=tuple(chosen),
        )
    ]


def _settings(cfg: RunConfig, shape: ModelShape) -> list[str]:
    """Return the settings of the teacher's engine, the user's last."""
    teacher = cfg.algorithm.teacher
    context = cfg.actor.max_model_len + SCORING_CONTEXT
    fitting = [f for f in fitting_overrides(shape) if not f.startswith("actor.max_")]
    own = [
        *fitting,
        f"actor.max_model_len={context}",
        f"actor.max_turn_tokens={min(16, context - 1)}",
        f"actor.turn_timeout_s={max(teacher.timeout_s, 1.0):g}",
    ]
    if teacher.num_top > VLLM_MAX_LOGPROBS:
        own.append(f"actor.engine_args.max_logprobs={teacher.num_top}")
    return [*own, *teacher.serve]
