"""Laws of the command `gather`."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config.learner import LoraSection
from common.errors import ConfigError
from common.store.run_start import save_config
from learner.policy.lora import ADAPTER_TENSORS
from learner.training.checkpoint import TENSORS
from learner.training.shards import is_whole, read_manifest
from tests.learner.builders import make_model, make_model_with_adapters, run_config_with_policy
from tests.learner.training.split_shards import home_at, save_split
from tools.cli.command_line import parse
from tools.offline.gather import gather


class Split:
    """A run with a split checkpoint of step 3, whose file was moved to another folder."""

    def __init__(self, root: Path, *, rank: int = 0) -> None:
        self.cfg = run_config_with_policy(root)
        tokenizer = AutoTokenizer.from_pretrained("configs/policies/tiny", local_files_only=True)
        tokenizer.save_pretrained(self.cfg.model.path)
        self.cfg = replace(self.cfg, run=replace(self.cfg.run, dir=str(root / "runs"), name="a"))
        if rank:
            learner = replace(self.cfg.learner, lora=LoraSection(rank=rank))
            self.cfg = replace(self.cfg, learner=learner)
        self.model = make_model_with_adapters(seed=7, rank=rank) if rank else make_model(seed=7)
        self.root = root / "runs" / "a" / "checkpoints"
        home = home_at(root / "disk")
        self.folder = save_split(self.root, 3, self.model, tokenizer, home)
        (root / "disk").rename(root / "moved")
        (self.file,) = read_manifest(self.folder)
        self.moved = root / "moved" / "step-000003-a1" / self.file.name
        self.lines: list[str] = []
        save_config(self.cfg, self.root.parent / "config.yaml")

    def gather(self, *words: str) -> int:
        request = parse(["gather", "run.name=a", f"run.dir={self.cfg.run.dir}", *words])
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = gather(request)
        self.lines += output.getvalue().splitlines()
        return code


def test_gathered_checkpoint_is_whole(tmp_path: Path) -> None:
    run = Split(tmp_path)
    assert run.gather(str(tmp_path / "moved")) == 0, run.lines
    assert is_whole(run.folder)
    found = AutoModelForCausalLM.from_pretrained(run.folder).state_dict()
    expected = run.model.state_dict()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert run.gather() == 0
    assert run.lines[-1].endswith("is whole")


@pytest.mark.slow
def test_gathered_adapters_are_whole(tmp_path: Path) -> None:
    run = Split(tmp_path, rank=4)
    assert (run.folder / "adapter_config.json").exists()
    assert run.gather(str(tmp_path / "moved")) == 0, run.lines
    assert (run.folder / ADAPTER_TENSORS).exists()


def test_missing_file_is_named_with_a_copy_command(tmp_path: Path) -> None:
    run = Split(tmp_path)
    assert run.gather() == 1
    assert f"node 1 (gpu-b): {run.file.path}" in run.lines[1]
    assert f"scp 10.0.0.2:{run.file.path} {run.folder}/state/" in run.lines[3]
    assert not is_whole(run.folder)


def test_file_with_another_digest_is_not_gathered(tmp_path: Path) -> None:
    run = Split(tmp_path)
    content = bytearray(run.moved.read_bytes())
    content[10] ^= 1
    run.moved.write_bytes(content)
    (run.folder / TENSORS / run.file.name).write_bytes(content)
    assert run.gather(str(tmp_path / "moved")) == 1
    assert "the file here has another digest" in run.lines[1]
    assert not is_whole(run.folder)


def test_copied_file_is_verified_in_its_place(tmp_path: Path) -> None:
    run = Split(tmp_path)
    (run.folder / TENSORS / run.file.name).write_bytes(run.moved.read_bytes())
    assert run.gather("step=3") == 0, run.lines


def test_url_is_searched_for_files(tmp_path: Path) -> None:
    run = Split(tmp_path)
    assert run.gather(f"file://{tmp_path}") == 0, run.lines


def test_unknown_step_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has the complete steps: 3"):
        Split(tmp_path).gather("step=4")
