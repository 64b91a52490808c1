"""Laws of the shipped presets: each passes the memory plan on the machine that it names."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from common.checks.machine import GIB, Gpu
from common.checks.memory_plan import check_memory, make_plan, plan_lines, plan_named
from common.checks.model_shape import read_shape
from common.checks.preflight import check_devices, check_dry
from common.config.load import list_configs, load_config
from common.config.run_config import RunConfig, check_training
from common.errors import ConfigError
from common.repository import ROOT

SMALL_HOST_BYTES = 16 * GIB  # a laptop's
NEEDS_ITS_MACHINE = [name for name in list_configs(ROOT) if "qwen" in name]


def load(name: str, *overrides: str) -> RunConfig:
    return load_config(name, overrides, root=ROOT, is_dry=True)


@pytest.mark.parametrize("name", list_configs(ROOT))
def test_preset_fits_its_named_or_small_machine(name: str) -> None:
    cfg = load(name)
    check_training(cfg)
    is_made = (ROOT / cfg.model.path).is_dir()  # or by another preset, first
    shape = read_shape(ROOT / (cfg.model.path if is_made else cfg.model.architecture))
    if cfg.machine.num_gpus:
        places = plan_named(cfg, shape)
        num_gpus = sum("gpu" in place.name for place in places)
        assert num_gpus == cfg.machine.num_nodes * cfg.machine.num_gpus  # none is left idle
        assert all(place.capacity_bytes for place in places)
    else:
        places = make_plan(cfg, shape, on=(), host_bytes=SMALL_HOST_BYTES)
    check_memory(cfg, places, shape)
    assert plan_lines(places)


@pytest.mark.parametrize("name", NEEDS_ITS_MACHINE)
def test_large_model_preset_names_machine_and_architecture(name: str) -> None:
    cfg = load(name)
    assert cfg.machine.num_gpus > 0
    assert read_shape(ROOT / cfg.model.architecture).num_params == 7_615_616_512  # as published
    check_dry(cfg, ROOT)


def dry_run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run.py"), "--dry-run", *argv]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", env=os.environ | env, timeout=60
    )


def with_gpu(folder: Path, *, mib: int, number: int = 1) -> str:
    """Return a PATH on which nvidia-smi answers with GPUs of a size."""
    lines = "".join(f"GPU-{i}, NVIDIA RTX 4090, {mib}\n" for i in range(number))
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '{lines}'\n", encoding="utf-8")
    script.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.slow
def test_dry_run_prints_memory_plan_without_gpu() -> None:
    done = dry_run("--config", "textcraft-qwen7b")
    assert done.returncode == 0, done.stderr
    assert "# This machine has no GPU. Plan for the target, 1 node with 8 GPUs" in done.stdout
    for label in ("learner weights", "gradients", "optimizer", "reference", "activations"):
        assert re.search(rf"#\s+[\d.]+ GiB  {label}", done.stdout), label
    assert "# objective: maximise" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["learner.num_gpus=1", "actor.num_gpus=1"]])
def test_small_gpu_is_refused_quickly_with_numbers(overrides: list[str], tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = dry_run("--config", "textcraft-qwen7b", *overrides, PATH=with_gpu(tmp_path, mib=24_564))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 2, done.stdout
    assert re.search(r"about [\d.]+ GiB .*(24\.0 GiB)", done.stderr), done.stderr
    assert "learner.num_gpus" in done.stderr
    assert done.stdout == ""
    assert took_s < 2.0  # CPU time excludes other processes.


def test_role_process_across_two_nodes_is_refused() -> None:
    two = ("machine.num_nodes=2", "machine.num_gpus=4")
    shape = read_shape(ROOT / load("textcraft-qwen7b").model.path)
    with pytest.raises(ConfigError, match=r"learner\.num_ranks=6: all ranks run on one node"):
        plan_named(load("textcraft-qwen7b", *two, "learner.num_gpus=6", "actor.num_gpus=2"), shape)
    wide = ("learner.num_gpus=3", "actor.tensor_parallel_size=2", "actor.num_gpus=4")
    with pytest.raises(ConfigError, match=r"GPUs of two nodes, which have 4 each"):
        plan_named(load("textcraft-qwen7b", *two, *wide), shape)


@pytest.mark.parametrize(
    ("overrides", "ranks", "actors"),
    [
        ([], 1, 1),
        (["learner.num_gpus=4", "actor.num_gpus=6", "actor.tensor_parallel_size=2"], 4, 3),
        (["learner.num_gpus=4", "learner.num_ranks=4", "actor.num_actors=3"], 4, 3),
        (["actor.num_gpus=2", "actor.num_actors=2"], 1, 2),
    ],
)
def test_gpu_count_of_a_role_sets_processes(
    overrides: list[str], ranks: int, actors: int, repository: Path
) -> None:
    cfg = load_config("smoke", ["learner.device=auto", *overrides], root=repository)
    assert (cfg.learner.num_ranks, cfg.actor.num_actors) == (ranks, actors)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["learner.num_gpus=4", "learner.num_ranks=2"], "must be 0 or learner.num_ranks=2"),
        (["learner.num_gpus=1", "learner.device=cpu"], "must be 0 with learner.device=cpu"),
        (
            ["actor.num_gpus=3", "actor.tensor_parallel_size=2"],
            "must be 0 or (actor.num_actors=1) x actor.tensor_parallel_size=2 = 2",
        ),
        (["actor.num_gpus=3", "actor.num_actors=2"], "(actor.num_actors=2) x actor.tensor_par"),
    ],
)
def test_wrong_gpu_sum_is_refused_with_numbers(
    overrides: list[str], words: str, repository: Path
) -> None:
    device = [] if any("device" in each for each in overrides) else ["learner.device=auto"]
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config("smoke", [*device, *overrides], root=repository)


def test_gpu_request_is_refused_without_a_gpu(repository: Path) -> None:
    cfg = load_config("smoke", ["actor.num_gpus=1"], root=repository)
    with pytest.raises(ConfigError, match=r"actor\.num_gpus=1: nvidia-smi lists no GPU"):
        check_devices(cfg)


def test_plan_lists_identical_neighbours_once() -> None:
    cfg = load("textcraft-qwen7b")
    on = [Gpu(name="", memory_bytes=80 * GIB)] * 8
    lines = plan_lines(make_plan(cfg, read_shape(ROOT / cfg.model.path), on=on, host_bytes=0))
    heads = [line for line in lines if line.startswith("memory, ")]
    assert len(heads) == 4  # rank 0, the other ranks, the engines, the host
    assert "gpu 1 and 2 equal ones, up to gpu 3" in heads[1]
