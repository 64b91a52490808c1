"""Laws of quantised checkpoints as models of a command: one conversion, in a cache."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.conformance.networks import save_composite
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import prepare, save_config
from learner.policy.model import load_policy
from learner.policy.model_kind import check_trainable
from learner.policy.model_shape import read_shape
from tests.tools.dequantise.toys import llama_weights, write_fp8, write_gguf, write_small_files
from tools.checks.doctor import examine_cache, examine_quantised
from tools.checks.hub_models import resolve_models
from tools.checks.preflight import check_model
from tools.dequantise import cache
from tools.dequantise.models import disk_lines, plain_models, weight_lines, with_cache_paths
from tools.dequantise.record import RECORD, identity_of, read_record


@pytest.fixture(autouse=True)
def folder_of_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "longstride" / "dequantised"


def config(tmp_path: Path, path: Path, *overrides: str, dtype: str = "bfloat16") -> RunConfig:
    where = (
        f"run.dir={tmp_path / 'runs'}",
        "run.name=r",
        f"model.path={path}",
        f"model.dtype={dtype}",
    )
    return load_config("smoke", [*where, *overrides])


def weights_in(folder: str | Path) -> dict[str, torch.Tensor]:
    return {k: v for path in Path(folder).glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_checkpoint_of_8_bits_becomes_a_plain_one(
    tmp_path: Path, folder_of_cache: Path, dtype: str
) -> None:
    expected = write_fp8(tmp_path / "fp8")
    cfg = plain_models(config(tmp_path, tmp_path / "fp8", dtype=dtype))
    folder = Path(cfg.model.path)
    assert folder.parent == folder_of_cache
    assert cfg.model.quantised == str(tmp_path / "fp8")
    assert cfg.model.label == "fp8"
    check_model(cfg.model.path)
    check_trainable(folder)
    got = weights_in(folder)
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        kind = torch.float32 if dtype == "float32" and ".layers." in name else torch.bfloat16
        is_copied = ".layers." not in name or weight.ndim < 2
        assert got[name].equal(weight.to(torch.bfloat16 if is_copied else kind)), name
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in tree
    assert tree["torch_dtype"] == dtype
    assert tree["hidden_size"] == 64
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (tmp_path / "fp8" / name).read_bytes()


def test_second_start_uses_the_cache(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_fp8(tmp_path / "fp8")
    cfg = config(tmp_path, tmp_path / "fp8", f"algorithm.reference_path={tmp_path / 'fp8'}")
    first = plain_models(cfg)
    assert first.algorithm.reference_path == first.model.path
    assert capfd.readouterr().err.count("dequantising") == 1
    written = (Path(first.model.path) / "config.json").stat().st_mtime_ns
    assert plain_models(cfg) == first
    assert plain_models(first) == first
    assert (Path(first.model.path) / "config.json").stat().st_mtime_ns == written
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("changed", ["weights", "tokenizer", "dtype"])
def test_other_files_have_another_folder(tmp_path: Path, changed: str) -> None:
    write_fp8(tmp_path / "fp8")
    cfg = config(tmp_path, tmp_path / "fp8")
    first = plain_models(cfg).model.path
    if changed == "weights":
        path = tmp_path / "fp8" / "model-00001-of-00002.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif changed == "tokenizer":
        (tmp_path / "fp8" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    else:
        cfg = replace(cfg, model=replace(cfg.model, dtype="float32"))
    assert plain_models(cfg).model.path != first


def test_identity_has_the_time_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 << 20))
    before = identity_of([], [path], {})
    os.utime(path, (1, 1))
    assert identity_of([], [path], {}) != before
    os.utime(path, ns=(0, path.stat().st_mtime_ns))
    once = identity_of([], [path], {})
    assert identity_of([], [path], {}) == once
    assert identity_of([], [path], {"dtype": "float32"}) != once
    with path.open("r+b") as file:
        file.seek(2 << 20)  # A sample.
        file.write(b"1")
    os.utime(path, (1, 1))
    assert identity_of([], [path], {}) != once


def test_changed_model_is_another_experiment(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8")
    run_dir = RunDir(root=tmp_path / "runs" / "r")
    cfg = config(tmp_path, tmp_path / "fp8")
    first = plain_models(cfg)
    save_config(first, run_dir.config)
    elsewhere = replace(cfg, model=replace(cfg.model, cache_folder=str(tmp_path / "other")))
    assert prepare(plain_models(elsewhere), run_dir) is None
    (tmp_path / "fp8" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.path: was fp8-\w+, now fp8-\w+"):
        prepare(plain_models(cfg), run_dir)


def test_lost_cache_is_written_again_from_the_source(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8")
    first = plain_models(config(tmp_path, tmp_path / "fp8"))
    before = weights_in(first.model.path)
    shutil.rmtree(first.model.path)
    assert plain_models(first) == first
    after = weights_in(first.model.path)
    assert all(after[name].equal(weight) for name, weight in before.items())
    shutil.rmtree(first.model.path)
    (tmp_path / "fp8" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"^model\.path=.*is missing, and .*fp8.* gives other weights"
    ):
        plain_models(first)
    shutil.rmtree(tmp_path / "fp8")
    assert plain_models(first).model.path == first.model.path  # Other checks report it.


@pytest.mark.parametrize("damage", ["weights", "record", "cut"])
def test_incomplete_folder_is_not_used(tmp_path: Path, damage: str) -> None:
    write_fp8(tmp_path / "fp8")
    cfg = config(tmp_path, tmp_path / "fp8")
    folder = Path(plain_models(cfg).model.path)
    weights = next(folder.glob("*.safetensors"))
    size = weights.stat().st_size
    if damage == "weights":
        weights.unlink()
    elif damage == "record":
        (folder / RECORD).unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
    assert plain_models(cfg).model.path == str(folder)
    assert next(folder.glob("*.safetensors")).stat().st_size == size
    assert read_record(folder) is not None


KILLED = """
import os, sys
from tests.tools.dequantise.test_models import config
from tools.dequantise import tensors
from tools.dequantise.models import plain_models
from pathlib import Path

def die(path, *rest):
    path.write_bytes(b"half")
    os._exit(9)

tensors._write_file = die
plain_models(config(Path(sys.argv[1]), Path(sys.argv[1]) / "fp8"))
"""


@pytest.mark.slow
def test_killed_start_leaves_no_model(tmp_path: Path, folder_of_cache: Path) -> None:
    write_fp8(tmp_path / "fp8")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    assert ended.returncode == 9
    assert [path.name[0] for path in folder_of_cache.iterdir()] == [".", "."]  # Lock and rest.
    cfg = plain_models(config(tmp_path, tmp_path / "fp8"))
    check_model(cfg.model.path)
    assert not [*folder_of_cache.glob("*.partial"), *folder_of_cache.glob(".*.partial")]


BOTH = """
import sys
from pathlib import Path
from tests.tools.dequantise.test_models import config
from tools.dequantise.models import plain_models

print(plain_models(config(Path(sys.argv[1]), Path(sys.argv[1]) / "fp8")).model.path)
"""


@pytest.mark.slow
def test_two_starts_at_once_write_one_model(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8")
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", BOTH, str(tmp_path)],
            cwd=ROOT,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    ended = [start.communicate() for start in starts]
    assert [start.returncode for start in starts] == [0, 0], ended
    assert ended[0][0] == ended[1][0]
    assert sum(err.count("dequantising") for _, err in ended) == 1


def test_full_disk_is_an_error_before_and_during_the_conversion(
    tmp_path: Path, folder_of_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fp8(tmp_path / "fp8")
    cfg = config(tmp_path, tmp_path / "fp8")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cache.shutil, "disk_usage", lambda _: usage._replace(free=1_000))
        with pytest.raises(ConfigError, match=r"^model\.path=.*they need 0\.0 GB in .*are free"):
            plain_models(cfg)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", fail)
        with pytest.raises(ConfigError, match=r"set model\.cache_folder to a folder on another"):
            plain_models(cfg)
    assert not [path for path in folder_of_cache.iterdir() if path.is_dir()]
    plain_models(cfg)


def test_file_as_cache_folder_is_refused(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    cfg = config(tmp_path, tmp_path / "fp8", f"model.cache_folder={tmp_path / 'file'}")
    with pytest.raises(ConfigError, match=r"^model\.cache_folder=.*Set another folder"):
        plain_models(cfg)


def test_dry_run_writes_no_cache_and_knows_the_sizes(tmp_path: Path, folder_of_cache: Path) -> None:
    write_fp8(tmp_path / "fp8")
    cfg = config(tmp_path, tmp_path / "fp8")
    dry = plain_models(cfg, is_dry=True)
    assert not folder_of_cache.exists()
    check_model(dry.model.path)
    check_trainable(Path(dry.model.path))
    (line,) = weight_lines(dry)
    assert f"{tmp_path / 'fp8'} (fp8) as bfloat16, 0.00 GB in {folder_of_cache}" in line
    (line,) = disk_lines(dry)
    assert f"{folder_of_cache} needs 0.00 GB" in line
    (row,) = examine_quantised(dry)
    assert row.what == "weights"
    assert row.remedy == ""
    text = with_cache_paths(f"path: {dry.model.path}", dry)
    real = plain_models(cfg)
    assert text == f"path: {real.model.path}"
    assert read_shape(Path(dry.model.path)) == read_shape(Path(real.model.path))
    assert plain_models(cfg, is_dry=True) == real
    assert disk_lines(real) == []
    assert len(weight_lines(real)) == 1


def test_every_key_of_a_model_takes_a_quantised_one(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8")
    path = tmp_path / "fp8"
    keys = ("algorithm.reference_path", "algorithm.teacher.path", "learner.critic.path")
    seats = f"actor.seats.opponents=[self,{path}]"
    cfg = config(tmp_path, path, *(f"{key}={path}" for key in keys), seats)
    plain = plain_models(cfg)
    folder = plain.model.path
    assert plain.algorithm.reference_path == folder
    assert plain.algorithm.teacher.path == folder
    assert plain.learner.critic.path == folder
    assert plain.actor.seats.opponents == ["self", folder]


@pytest.mark.parametrize("method", ["awq", "gptq", "quanto", "mxfp6"])
def test_other_methods_remain_refused_by_name(tmp_path: Path, method: str) -> None:
    write_fp8(tmp_path / "m", num_hidden_layers=2)
    write_small_files(tmp_path / "m", quantization_config={"quant_method": method})
    cfg = config(tmp_path, tmp_path / "m")
    assert plain_models(cfg) == cfg
    with pytest.raises(ConfigError, match=rf"weights are quantised \({method}\)"):
        check_trainable(tmp_path / "m")


@pytest.mark.slow
def test_damaged_and_foreign_checkpoints_are_refused_before_the_cache(
    tmp_path: Path, folder_of_cache: Path
) -> None:
    write_fp8(tmp_path / "cut")
    path = tmp_path / "cut" / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"^model\.path=.*lacks its last 5 bytes"):
        plain_models(config(tmp_path, tmp_path / "cut"))
    write_fp8(tmp_path / "other")
    section = {"quant_method": "mxfp4"}
    write_small_files(tmp_path / "other", quantization_config=section)
    with pytest.raises(ConfigError, match=r"\(mxfp4\), and they cannot be dequantised: .*F8_E4M3"):
        plain_models(config(tmp_path, tmp_path / "other"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ConfigError, match=r"x\.gguf: .*\(gguf\), and they cannot be dequantised"):
        plain_models(config(tmp_path, tmp_path / "x.gguf"))
    assert not folder_of_cache.exists()


@pytest.mark.parametrize("name", ["models/x.gguf", "/nowhere/x.gguf", "x.gguf"])
def test_missing_gguf_file_is_named(tmp_path: Path, name: str) -> None:
    cfg = resolve_models(load_config("smoke", [f"run.dir={tmp_path}", f"model.path={name}"]))
    with pytest.raises(ConfigError, match=rf"^model\.path={name}: no such file"):
        check_model(plain_models(cfg).model.path)


def test_plain_checkpoint_is_no_other(tmp_path: Path) -> None:
    cfg = load_config("smoke", [f"run.dir={tmp_path}"])
    assert plain_models(cfg) == cfg
    assert weight_lines(cfg) == []


@pytest.mark.slow
def test_gguf_file_and_parts_become_plain_checkpoints(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = write_gguf(tmp_path / "toy.gguf")
    cfg = plain_models(config(tmp_path, tmp_path / "toy.gguf"))
    got = weights_in(cfg.model.path)
    assert got.keys() == expected.keys() == llama_weights().keys()
    for name, weight in expected.items():
        assert got[name].equal(weight.bfloat16()), name
    check_model(cfg.model.path)
    loaded: Any = AutoModelForCausalLM
    model, report = loaded.from_pretrained(
        cfg.model.path, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"] | report["unexpected_keys"]
    assert model.config.rope_parameters["rope_theta"] == 10_000.0
    assert model.generation_config.eos_token_id == [2, 4]
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
    assert tokenizer("<|im_start|>A B<|im_end|>").input_ids == [3, 37, 62, 38, 4]
    said = tokenizer.apply_chat_template([{"role": "user", "content": "C"}], tokenize=False)
    assert said == "<|im_start|>C<|im_end|>"

    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "parts" / "toy.gguf", tensors_per_file=9)
    parts = sorted((tmp_path / "parts").glob("*.gguf"))
    assert len(parts) == 3
    in_parts = plain_models(config(tmp_path, tmp_path / "parts"))
    assert all(weights_in(in_parts.model.path)[name].equal(got[name]) for name in got)
    of_file = plain_models(config(tmp_path, parts[1]))
    assert weights_in(of_file.model.path).keys() == got.keys()
    parts[2].unlink()
    with pytest.raises(ConfigError, match="2 of its 3 parts are there"):
        plain_models(config(tmp_path, parts[0]))
    shutil.copyfile(tmp_path / "toy.gguf", tmp_path / "parts" / "other.gguf")
    with pytest.raises(ConfigError, match=r"has several models \(other\.gguf, toy-00001"):
        plain_models(config(tmp_path, tmp_path / "parts"))


def rope_of(tmp_path: Path, path: Path) -> dict[str, object]:
    folder = plain_models(config(tmp_path, path)).model.path
    tree = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return tree["rope_parameters"]


@pytest.mark.slow
def test_scaling_of_positions_in_gguf_is_kept(tmp_path: Path) -> None:
    # Llama 3.2: wavelengths above 8,192 tokens are 32 times as long, those below 2,048 unchanged.
    wavelengths = 2 * math.pi * 10_000.0 ** (np.arange(0, 32, 2) / 32)
    smooth = (8192 / wavelengths - 1) / 3
    table = 1 / ((1 - smooth) / 32 + smooth)
    table = np.where(wavelengths > 8192, 32.0, np.where(wavelengths < 2048, 1.0, table))
    assert table.max() == 32.0
    write_gguf(tmp_path / "a.gguf", table=table)
    rope = rope_of(tmp_path, tmp_path / "a.gguf")
    assert rope["rope_type"] == "llama3"
    assert (rope["factor"], rope["rope_theta"]) == (32.0, 10_000.0)
    assert (rope["low_freq_factor"], rope["high_freq_factor"]) == (1.0, 4.0)
    assert rope["original_max_position_embeddings"] == 8192
    scaling = "llama__rope__scaling__"
    fields = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    write_gguf(tmp_path / "b.gguf", **{scaling + key: value for key, value in fields.items()})
    rope = rope_of(tmp_path, tmp_path / "b.gguf")
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert {key: rope[key] for key in expected} == expected
    write_gguf(tmp_path / "c.gguf", table=table[::-1])
    with pytest.raises(
        ConfigError, match=r"rope_freqs\.weight is not the table of rope_type=llama3"
    ):
        rope_of(tmp_path, tmp_path / "c.gguf")


@pytest.mark.slow
def test_gguf_that_transformers_would_misread_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", pre="some-rule")
    with pytest.raises(ConfigError, match=r"splits texts by the rule 'some-rule'"):
        plain_models(config(tmp_path, tmp_path / "a.gguf"))
    (tmp_path / "with").mkdir()
    write_gguf(tmp_path / "with" / "a.gguf", pre="some-rule")
    shutil.copyfile(ROOT / "configs/policies/tiny/tokenizer.json", tmp_path / "with/tokenizer.json")
    plain_models(config(tmp_path, tmp_path / "with"))
    write_gguf(tmp_path / "b.gguf", llama__rope__scaling__type="strange")
    with pytest.raises(ConfigError, match=r"llama\.rope\.scaling\.type=strange is not supported"):
        plain_models(config(tmp_path, tmp_path / "b.gguf"))


def test_doctor_names_folders_whose_source_has_changed(
    tmp_path: Path, folder_of_cache: Path
) -> None:
    cfg = config(tmp_path, tmp_path / "fp8")
    assert examine_cache(cfg) == []
    write_fp8(tmp_path / "fp8")
    old = plain_models(cfg).model.path
    (check,) = examine_cache(cfg)
    assert check.result.startswith("1 checkpoint, 0.00 GB in ")
    assert check.remedy == ""
    (tmp_path / "fp8" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    new = plain_models(cfg).model.path
    partial = folder_of_cache / ".killed-0123.partial"
    partial.mkdir()
    (check,) = examine_cache(cfg)
    assert check.result.startswith("3 checkpoints")
    assert "outdated: 2" in check.result
    assert check.remedy.endswith(f"rm -r {partial} {old}")
    (tmp_path / "fp8").rename(tmp_path / "elsewhere")
    (check,) = examine_cache(cfg)
    assert check.remedy.endswith(f"rm -r {partial} {' '.join(sorted([old, new]))}")


@pytest.mark.slow
def test_composite_in_8_bits_keeps_its_towers(tmp_path: Path, folder_of_cache: Path) -> None:
    start = save_composite("mistral3", tmp_path / "start")
    expected = weights_in(start)
    stored = dict(expected)
    for name in [each for each in expected if each.endswith("_proj.weight")]:
        if name.startswith("language_model."):
            scale = torch.rand(1, 1) + 0.5  # One block.
            stored |= {name: expected[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
            expected[name] = stored[name].float() * scale
    for path in start.glob("model*"):
        path.unlink()
    save_file(stored, start / "model.safetensors")
    tree = json.loads((start / "config.json").read_text(encoding="utf-8"))
    section = {"quant_method": "fp8", "weight_block_size": [512, 512]}
    text = json.dumps(tree | {"quantization_config": section})
    (start / "config.json").write_text(text, encoding="utf-8")
    (start / "preprocessor_config.json").write_text("{}", encoding="utf-8")
    folder = Path(plain_models(config(tmp_path, start, dtype="float32")).model.path)
    assert folder.parent == folder_of_cache
    assert (folder / "preprocessor_config.json").is_file()
    got = weights_in(folder)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name].float(), each) for name, each in expected.items())
    policy = load_policy(str(folder), device="cpu")
    table: Any = policy.get_input_embeddings().weight
    assert torch.equal(table, expected["language_model.model.embed_tokens.weight"])
