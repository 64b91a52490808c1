"""Settings of `eval` that fit the model, and checks before it starts."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from actor.engine.arguments import check_engine_args
from actor.formats.checks import check_rendering
from actor.seats.endpoint import read_key
from common.config.load import override_value
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.formats.answers import check_tools
from common.formats.chat_template import template_at
from common.repository import ROOT
from learner.policy.model_kind import check_kind
from learner.policy.model_shape import read_shape
from learner.training.shards import check_whole
from tools.checks.hub_models import resolve_models
from tools.checks.preflight import check_agent, check_engine, check_model
from tools.checks.served_engines import fitting_overrides
from tools.cli.command_line import ParsedCommand
from tools.cli.requested import load_named
from tools.dequantise.models import plain_models
from tools.evaluate.config import EvalConfig


def load_evaluation(request: ParsedCommand) -> EvalConfig:
    """Return the config of an evaluation.

    Without `--config`, a `model.path` of another shape than the configured policy's gets a context
    limit, a turn length and a cache that fit it. The chosen values are printed on stderr.
    """
    defaults: list[str] = []
    if _overrides_key(request, "policy.url") and not _overrides_key(request, "model.path"):
        defaults.append("model.path=unset")  # No checkpoint is played.
    is_listed = override_value(request.overrides, "eval.items") in ("tasks", "paper")
    if is_listed and not _overrides_key(request, "eval.num_items"):
        defaults.append("eval.num_items=-1")  # All items of the lists.
    cfg: EvalConfig = _with_models(request, defaults)
    if request.config is not None or cfg.policy.url or not _overrides_key(request, "model.path"):
        return cfg
    fitting = [each for each in _fitting(cfg, request) if not _overrides_key(request, _key(each))]
    if not fitting:
        return cfg
    name = cfg.model.source or cfg.model.quantised or cfg.model.path
    chosen = f"eval: {' '.join(fitting)} (from {name}; give them, or --config NAME)"
    print(chosen, file=sys.stderr)
    return _with_models(request, [*defaults, *fitting])


def _with_models(request: ParsedCommand, defaults: Sequence[str]) -> EvalConfig:
    """Return the config with the folders of its models."""
    cfg: EvalConfig = load_named(request, defaults=defaults)
    cfg = resolve_models(cfg, is_dry=request.is_dry, may_stand_in=request.is_dry)
    return plain_models(cfg, is_dry=request.is_dry, is_trained=False)


def check_evaluation(cfg: EvalConfig, *, missing: Sequence[str], is_dry: bool) -> None:
    """Check that the evaluation can start.

    Args:
        is_dry: weights that a start downloads are not required.

    Raises: ConfigError: the environments, the policy or the engine lack a requirement.
    """
    if missing:
        raise ConfigError("; ".join(missing))
    check_policy(cfg, is_dry=is_dry)
    if not cfg.policy.url:
        check_own_engine(cfg)
        check_agent(cfg.actor)


def check_own_engine(cfg: RunConfig) -> None:
    """Check that an engine can start here. Raises: ConfigError: it lacks a requirement."""
    check_whole(Path(cfg.model.path), key="model.path", shown=cfg.model.path)
    check_engine()
    check_engine_args(cfg.actor.engine_args)


def check_policy(cfg: EvalConfig, *, is_dry: bool = False) -> None:
    """Check the tasks and the policy before anything starts.

    Args:
        is_dry: weights that a start downloads are not required.

    Raises:
        ConfigError: no task or item, no such checkpoint or key, or a tokenizer that does not fit
            the model.
    """
    if not cfg.tasks:
        raise ConfigError("tasks=[]: add at least one task, such as tasks=[{env: e, subset: s}]")
    if cfg.eval.num_items == 0:
        raise ConfigError("eval.num_items=0: must not be 0. Use -1 for all held-out items.")
    if cfg.policy.url:
        if cfg.actor.endpoint:
            raise ConfigError(
                f"policy.url={cfg.policy.url}: actor.agent can only use the model at model.path"
            )
        read_key(cfg.policy)
        return
    _check_checkpoint(cfg, is_dry=is_dry)
    _check_vocabulary(ROOT / cfg.model.path, cfg.model.path)
    check_rendering(cfg)


def _check_checkpoint(cfg: EvalConfig, *, is_dry: bool) -> None:
    """Check the checkpoint at `model.path`, or the sizes that stand in for it in a dry run."""
    if is_dry and cfg.model.path == cfg.model.architecture:
        check_kind(ROOT / cfg.model.path, key="model.architecture", shown=cfg.model.path)
        return
    check_model(cfg.model.path)
    check_tools(cfg.actor.format, ROOT / cfg.model.path, template=template_at(cfg.model))


def _check_vocabulary(folder: Path, shown: str) -> None:
    """Check that the model has a row for each token. Raises: ConfigError.

    Added tokens are exempt: Gemma 3 1B has a token for images above its last row.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    num_rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    path = folder / "tokenizer.json"
    if not num_rows or not path.is_file():
        return
    largest = max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=False).values())
    if largest >= num_rows:
        raise ConfigError(
            f"model.path={shown}: the tokenizer has token id {largest}, but the model's ids"
            f" are below {num_rows}. Use the tokenizer of this model."
        )


def _key(override: str) -> str:
    """Return the key of an override."""
    return override.partition("=")[0]


def _overrides_key(request: ParsedCommand, key: str) -> bool:
    return override_value(request.overrides, key) is not None


def _fitting(cfg: EvalConfig, request: ParsedCommand) -> list[str]:
    """Return overrides that fit the model; [] if it has the shape of the configured policy."""
    _check_checkpoint(cfg, is_dry=request.is_dry)
    shape = read_shape(ROOT / cfg.model.path)
    others = [each for each in request.overrides if _key(each).strip() != "model.path"]
    configured = load_named(replace(request, overrides=others)).model.path
    if (ROOT / configured / "config.json").is_file():
        base = read_shape(ROOT / configured)
        if (base.hidden, base.layers, base.vocab) == (shape.hidden, shape.layers, shape.vocab):
            return []
    return fitting_overrides(shape)
