"""Laws of the shipped presets: each passes the memory plan on the machine that it names."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from huggingface_hub import constants

from common.config.load import list_configs, load_config
from common.config.run_config import RunConfig, check_training
from common.errors import ConfigError
from common.host.machine import GIB, Gpu
from common.repository import ROOT
from learner.policy.model_shape import read_shape
from tests.marks import long_for
from tools.checks import hub_models
from tools.checks.hub_models import resolve_models
from tools.checks.memory_plan import check_memory, make_plan, plan_lines, plan_named
from tools.checks.preflight import check_devices, check_dry
from tools.cli.command_line import parse, run_command

SMALL_HOST_BYTES = 16 * GIB  # a laptop's
NEEDS_ITS_MACHINE = [name for name in list_configs() if "qwen" in name]
# Their models are those of `textcraft-qwen3-*`. One of each task always runs.
OTHER_TASKS = [
    name
    for name in NEEDS_ITS_MACHINE
    if name.startswith(("babyai-qwen3-", "dataset-qwen3-")) and not name.endswith("qwen3-4b")
]
# Of the sizes of one model, one with all weights and one with adapters runs its whole dry run.
OTHER_SIZES = [
    "textcraft-qwen3-0.6b",
    "textcraft-qwen3-8b",
    "textcraft-qwen3-8b-lora",
    "textcraft-qwen3-14b-lora",
]
COMMIT = "c" * 40
NUM_PUBLISHED = {  # Weights of each checkpoint as published, a tied head counted once.
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}
CARDS = {  # Size on the card: GiB of the smallest card that is sold with it.
    "24": 22.4,
    "80": 79.6,
}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder of an offline cache of the model hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_models._resolve.cache_clear()
    return tmp_path / "hub"


@cache
def plain(name: str) -> RunConfig:
    """Return a preset as it is, with its model not resolved."""
    return load_config(name, [], is_dry=True)


@cache
def load(name: str, *overrides: str) -> RunConfig:
    cfg = load_config(name, overrides, is_dry=True)
    return resolve_models(cfg, is_dry=True, may_stand_in=True)


def cache_model(hub: Path, name: str) -> Path:
    """Put a preset's model into the cache, with its sizes and a small tokenizer, no weights."""
    model = plain(name).model
    repository = hub / f"models--{model.path.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    shutil.copy(ROOT / model.architecture / "config.json", folder)
    for small in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "configs" / "policies" / "tiny" / small, folder)
    return folder


@pytest.mark.parametrize("name", list_configs())
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
    shape = read_shape(ROOT / cfg.model.architecture)
    assert shape.num_params == NUM_PUBLISHED[cfg.model.source]
    check_dry(cfg)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_for(NEEDS_ITS_MACHINE, OTHER_TASKS + OTHER_SIZES))
def test_dry_run_of_preset_needs_only_its_name(
    name: str, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cache_model(hub, name)
    assert run_command(parse(["--config", name, "--dry-run"])) == 0
    shown = capsys.readouterr().out
    machine = plain(name).machine
    assert f"# This machine has no GPU. Plan for the target, {machine.text}:" in shown
    assert f"path: {folder}" in shown
    assert "# prompts: two turns" in shown  # Its template renders a conversation.


def test_dry_run_without_model_files_uses_known_sizes(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run_command(parse(["--config", "babyai-qwen3-4b", "--dry-run"])) == 0
    assert "15.0 GiB  learner weights              4,022.5M x 4 B" in capsys.readouterr().out
    assert "lacks config.json, tokenizer.json of Qwen/Qwen3-4B" in caplog.text
    assert "The plan has the sizes of configs/architectures/qwen3-4b" in caplog.text


def test_start_without_model_files_is_refused_with_remedies() -> None:
    with pytest.raises(ConfigError, match=r"`hf download Qwen/Qwen3-4B`.*model\.path=FOLDER"):
        run_command(parse(["--config", "babyai-qwen3-4b"]))


@pytest.mark.parametrize("name", NEEDS_ITS_MACHINE)
def test_preset_comment_names_its_machine_rates_and_start(name: str) -> None:
    text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    machine = plain(name).machine
    size = re.search(r"(one|eight) GPUs? of (24|80) GB", comment)
    assert size is not None
    assert machine.num_gpus == {"one": 1, "eight": 8}[size[1]]
    assert machine.gpu_memory_gib == CARDS[size[2]]
    assert f"python run.py --config {name}" in comment
    own_rates = re.search(r"not measured: .*?[\d,]+ tokens/s", comment)
    assert own_rates or re.search(r"rates .*?textcraft-qwen", comment)


def test_norms_of_queries_and_keys_count(tmp_path: Path) -> None:
    sizes = {
        **{"model_type": "qwen3", "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4},
        **{"num_key_value_heads": 1, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"vocab_size": 10, "tie_word_embeddings": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
    assert read_shape(tmp_path).num_params == 80 + attention + 2 * 4 + 3 * 8 * 16 + 2 * 8 + 8


def dry_run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run.py"), "--dry-run", *argv]
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | env
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=env, timeout=240)


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
def test_small_gpu_is_refused_quickly_with_numbers(overrides: list[str]) -> None:
    gpu = json.dumps([["GPU-0", "NVIDIA RTX 4090", 24_564, []]])
    env = {"PYTHONPATH": str(ROOT / "tests/fake_driver"), "GPUS": gpu}
    done = dry_run("--config", "textcraft-qwen7b", *overrides, PYTHONPROFILEIMPORTTIME="1", **env)
    assert done.returncode == 2, done.stdout
    assert re.search(r"about [\d.]+ GiB .*(24\.0 GiB)", done.stderr), done.stderr
    assert "learner.num_gpus" in done.stderr
    assert done.stdout == ""
    imported = set(re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "common.errors" in imported
    assert imported.isdisjoint({"torch", "transformers", "vllm"})  # They would take seconds.


def test_role_process_across_two_nodes_is_refused() -> None:
    two = ("machine.num_nodes=2", "machine.num_gpus=4")
    shape = read_shape(ROOT / load("textcraft-qwen7b").model.path)
    with pytest.raises(ConfigError, match=r"learner\.num_ranks=6: 6 ranks run on one node"):
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
def test_gpu_count_of_a_role_sets_processes(overrides: list[str], ranks: int, actors: int) -> None:
    cfg = load_config("smoke", ["learner.device=auto", *overrides])
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
def test_wrong_gpu_sum_is_refused_with_numbers(overrides: list[str], words: str) -> None:
    device = [] if any("device" in each for each in overrides) else ["learner.device=auto"]
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config("smoke", [*device, *overrides])


def test_gpu_request_is_refused_without_a_gpu() -> None:
    cfg = load_config("smoke", ["actor.num_gpus=1"])
    with pytest.raises(ConfigError, match=r"actor\.num_gpus=1: nvidia-smi lists no GPU"):
        check_devices(cfg)


def test_plan_lists_identical_neighbours_once() -> None:
    cfg = load("textcraft-qwen7b")
    on = [Gpu(name="", memory_bytes=80 * GIB)] * 8
    lines = plan_lines(make_plan(cfg, read_shape(ROOT / cfg.model.path), on=on, host_bytes=0))
    heads = [line for line in lines if line.startswith("memory, ")]
    assert len(heads) == 4  # rank 0, the other ranks, the engines, the host
    assert "gpu 1 and 2 equal ones, up to gpu 3" in heads[1]
