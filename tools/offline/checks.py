"""Checks before `sft`, `dpo` and `evolve` start."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.config.learner import Offload
from common.config.load import override_value
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import GIB, check_compiler, has_cuda, memory_bytes
from common.host.temporary import check_temporary_room
from common.repository import CODE, ROOT
from learner.policy.model_kind import check_trainable
from learner.policy.precision_choice import choose_precision
from learner.trackers import check_trackers
from tools.checks.preflight import check, check_disk, check_model
from tools.checks.role_starts import check_networks
from tools.cli.command_line import ParsedCommand
from tools.exchange.records import as_conversation, preference_of, read_records, tokens_of
from tools.offline.config import (
    DpoConfig,
    DpoSection,
    EvolveConfig,
    SftConfig,
    SftSection,
    describe_rates,
)

SHIPPED_POLICIES = Path("configs") / "policies"  # Folder below the repository.


def check_sft(cfg: SftConfig, *, missing: Sequence[str] = ()) -> None:
    """Check that `sft` can start.

    Raises:
        ConfigError: the demonstrations or the initial policy are incomplete, or the output would
            overwrite one of the project's own policies.
    """
    if not cfg.sft.demonstrations and missing:
        raise ConfigError("; ".join(missing))
    _check_offline(cfg)
    if cfg.sft.from_scratch:
        _check_size_from_scratch(cfg.sft)
    else:
        check_model(cfg.model.path)
        check_trainable(ROOT / cfg.model.path, shown=cfg.model.path)
    output = (ROOT / cfg.sft.output).resolve() if cfg.sft.output else ROOT
    if output.is_relative_to((CODE / SHIPPED_POLICIES).resolve()) and not cfg.sft.overwrite:
        raise ConfigError(
            f"sft.output={cfg.sft.output}: this folder has policies that ship with the project."
            " To overwrite them, give sft.overwrite=true; otherwise use another sft.output"
        )
    check_disk(ROOT / cfg.run.dir / cfg.run.name)
    check_base(cfg)
    if cfg.sft.demonstrations:
        _check_episodes(cfg.sft.demonstrations, key="sft.demonstrations")


def check_model_is_used(request: ParsedCommand, cfg: SftConfig) -> None:
    """Check that `sft` reads a model that its command line names. Raises: ConfigError."""
    folder = override_value(request.overrides, "model.path")
    if folder is not None and cfg.sft.from_scratch:
        raise ConfigError(
            f"model.path={folder}: sft.from_scratch=true makes new weights and reads no model. Give"
            " sft.from_scratch=false to train this model"
        )


def check_base(cfg: SftConfig) -> None:
    """Check the network that `sft` begins with. Raises: ConfigError: as `check_networks`."""
    if not cfg.sft.from_scratch:
        check_networks(cfg, is_offline=True)
    elif cfg.learner.lora.rank:
        raise ConfigError(
            f"learner.lora.rank={cfg.learner.lora.rank}: sft.from_scratch=true makes a policy"
            " without a base model for adapters. Set learner.lora.rank=0 or sft.from_scratch=false."
        )


def check_dpo(cfg: DpoConfig) -> None:
    """Check that `dpo` can start. Raises: ConfigError: the model or the pairs are missing."""
    _check_offline(cfg)
    check_model(cfg.model.path)
    check_trainable(ROOT / cfg.model.path, shown=cfg.model.path)
    check_networks(cfg, is_offline=True)
    if not cfg.dpo.data:
        raise ConfigError(
            "dpo.data is not set. Set it to a run directory or to a file of episodes."
        )
    _check_episodes(cfg.dpo.data, key="dpo.data")


def check_evolve(cfg: EvolveConfig, *, missing: Sequence[str] = ()) -> None:
    """Check that `evolve` can start. Raises: ConfigError: as `check`."""
    _check_offline(cfg)
    check(cfg, missing=missing)
    check_networks(cfg, is_offline=True)


def _check_episodes(name: str, *, key: str) -> None:
    """Check that a source of episodes exists and that the first record of a file has a known form.

    Raises: ConfigError: it names the file, the record and the forms.
    """
    path = ROOT / name
    if not path.exists():
        raise ConfigError(f"{key}={name}: no such file or folder. Give a run directory or a file")
    if path.is_dir():
        return
    for place, record in read_records(path)[:1]:
        if key == "dpo.data" and preference_of(record, place):
            return
        if not tokens_of(record, place) and isinstance(record, dict):
            as_conversation(record, place)


def _check_offline(cfg: RunConfig) -> None:
    """Check the settings that all offline commands share. Raises: ConfigError."""
    check_trackers(cfg, os.environ)
    check_temporary_room()
    if cfg.learner.offload is Offload.OPTIMIZER:
        raise ConfigError(
            "learner.offload=optimizer: sft, dpo and evolve do not support it. Use"
            " learner.offload=none with adapters (learner.lora.rank=16) or learner.moments=8bit"
        )
    if cfg.learner.compile:
        check_compiler("learner.compile=true")


def _check_size_from_scratch(sft: SftSection) -> None:
    """Check that a new policy fits in memory: weights, gradients and two moments."""
    layer = 4 * sft.hidden_size**2 + 3 * sft.hidden_size * sft.intermediate_size
    needed = 16 * (sft.num_layers * layer + sft.vocab_size * sft.hidden_size)
    total, _ = memory_bytes()
    if 0 < total < needed:
        sizes = f"sft.num_layers={sft.num_layers}, intermediate_size={sft.intermediate_size}"
        raise ConfigError(
            f"sft.hidden_size={sft.hidden_size}: with {sizes} and vocab_size={sft.vocab_size}, the"
            f" policy needs {needed / GIB:,.0f} GiB; this machine has {total / GIB:,.0f} GiB"
        )


def rate_lines(command: str, cfg: RunConfig) -> list[str]:
    """Return the precision and the rates of a training command on this machine, for `--dry-run`."""
    offline: SftSection | DpoSection | None = None
    if isinstance(cfg, EvolveConfig):
        offline = replace(cfg.sft, from_scratch=False)
    elif isinstance(cfg, SftConfig):
        offline = cfg.sft
    elif isinstance(cfg, DpoConfig):
        offline = cfg.dpo
    elif command != "train":
        return []
    learner = cfg.learner if offline is None else offline.rated(cfg.learner)
    is_new = isinstance(offline, SftSection) and offline.from_scratch
    is_cuda = learner.device.startswith("cuda") or (learner.device == "auto" and has_cuda())
    folder = None if is_new else ROOT / cfg.model.path
    dtype = cfg.model.dtype if offline is None else ""  # Offline training has no engines.
    choice = choose_precision(learner, folder, is_cuda=is_cuda, engine_dtype=dtype)
    lines = [f"learner.precision: {choice.precision.value} ({choice.reason})"]
    if offline is not None:
        start = "new weights" if is_new else f"start model.path={cfg.model.path}"
        lines.append(f"{command}: {describe_rates(learner)} ({start})")
    return lines
