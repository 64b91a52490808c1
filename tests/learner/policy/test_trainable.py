"""Laws of quantised checkpoints: each command that trains refuses them by name."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from learner.policy.model import load_policy
from learner.policy.model_kind import check_trainable
from tests.tools.checks.models import write_model
from tools.checks.preflight import check, check_dry, check_model
from tools.offline.checks import check_dpo, check_sft
from tools.offline.config import DpoConfig, SftConfig


def save(folder: Path, **config: Any) -> Path:
    return write_model(folder, num_rest=1, vocab_size=64, num_hidden_layers=1, **config)


@pytest.mark.slow
def test_every_training_command_refuses_quantised_weights(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", quantization_config={"quant_method": "mxfp4"})

    def configured(*more: str, path: Path = folder, schema: Any = RunConfig) -> Any:
        where = [f"model.path={path}", f"run.dir={tmp_path / 'runs'}"]
        return load_config("smoke", [*where, *more], schema=schema)

    from_files = "sft.from_scratch=false"
    stand_in = f"model.architecture={folder}"
    small = save(tmp_path / "small", quantization_config=None)
    reference = ["algorithm.kl_coef=0.1", f"algorithm.reference_path={folder}"]
    for start in (
        lambda: check(configured()),
        lambda: check_dry(configured()),
        lambda: check_dry(configured(stand_in)),
        lambda: check(configured(*reference, path=small)),
        lambda: check_sft(configured(from_files, schema=SftConfig)),
        lambda: check_dpo(configured(schema=DpoConfig)),
        lambda: load_policy(str(folder), device="cpu"),
    ):
        with pytest.raises(ConfigError, match=r"weights are quantised \(mxfp4\).*in bf16"):
            start()
    check_model(str(folder))  # An engine serves them.


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
    ],
)
def test_refusal_names_the_quantisation(
    tmp_path: Path, config: dict[str, Any], method: str
) -> None:
    folder = save(tmp_path / "model", **config)
    with pytest.raises(ConfigError, match=rf"^model\.path=m: .*quantised \({method}\)"):
        check_trainable(folder, shown="m")


def test_weights_of_8_bits_are_refused_without_a_word_in_config(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    check_trainable(folder)
    entry = {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}
    text = json.dumps({"__metadata__": {"format": "pt"}, "up.weight": entry}).encode()
    (folder / "more.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ConfigError, match=r"up\.weight has the dtype F8_E4M3"):
        check_trainable(folder)


def test_missing_and_empty_sections_are_not_quantised(tmp_path: Path) -> None:
    check_trainable(tmp_path)
    check_trainable(save(tmp_path / "a", quantization_config=None))
    check_trainable(save(tmp_path / "b", quantization_config={}))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    (tmp_path / "a.safetensors").write_bytes(b"12")
    check_trainable(tmp_path)
