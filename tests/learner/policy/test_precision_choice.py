"""Laws of the rule that chooses the learner's precision."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.learner import LearnerSection, LoraSection, OptimizerKind, Precision, Rounding
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from learner.policy.precision_choice import PrecisionChoice, choose_precision, recorded_precision
from learner.policy.timing import choose_compute
from tests.learner.builders import make_model
from tools.offline.checks import rate_lines
from tools.offline.config import DpoConfig, EvolveConfig, SftConfig, SftSection

BF16, FP32 = Precision.BF16, Precision.FP32


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    make_model().bfloat16().save_pretrained(tmp_path)
    return tmp_path


def chosen(
    folder: Path | None,
    *,
    is_cuda: bool = False,
    has_units: bool = True,
    engine_dtype: str = "",
    **keys: Any,
) -> PrecisionChoice:
    learner = LearnerSection(**keys)
    return choose_precision(
        learner, folder, is_cuda=is_cuda, has_units=has_units, engine_dtype=engine_dtype
    )


@pytest.mark.parametrize(("lr", "expected"), [(1e-6, FP32), (3e-5, FP32), (1e-2, BF16)])
def test_bf16_checkpoint_trains_in_fp32_unless_the_rate_is_large(
    stored: Path, lr: float, expected: Precision
) -> None:
    choice = chosen(stored, lr=lr)
    assert choice.precision is expected
    assert f"{lr:.1e}" in choice.reason
    assert chosen(stored, lr=lr, is_cuda=True).precision is BF16


def test_muon_reaches_half_a_unit_by_its_rate_over_the_root_of_the_width(stored: Path) -> None:
    muon = {"optimizer": OptimizerKind.MUON, "lr": 1e-2}
    assert chosen(stored, **muon, muon_lr=0.1).precision is BF16
    assert chosen(stored, **muon, muon_lr=1e-4).precision is FP32


def test_checkpoint_of_bf16_numbers_is_found_in_fp32_files_too(tmp_path: Path) -> None:
    model = make_model().bfloat16().float()
    model.save_pretrained(tmp_path / "again")
    assert chosen(tmp_path / "again", lr=1e-5).precision is FP32
    with torch.no_grad():
        for parameter in model.parameters():  # A little training.
            parameter += 1e-6 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "trained")
    assert chosen(tmp_path / "trained", lr=1e-5).precision is FP32
    make_model().save_pretrained(tmp_path / "own")
    assert chosen(tmp_path / "own", lr=1e-5).precision is BF16


def test_bf16_rounds_stochastically_where_nearest_hides_most_updates(stored: Path) -> None:
    def rounding(folder: Path | None = stored, **keys: Any) -> Rounding:
        return chosen(folder, **{"precision": BF16, "lr": 1e-6} | keys).rounding

    assert rounding() is Rounding.STOCHASTIC
    assert rounding(rounding=Rounding.NEAREST) is Rounding.NEAREST
    assert rounding(lr=1e-2) is Rounding.NEAREST
    assert rounding(folder=None) is Rounding.NEAREST
    assert rounding(precision=FP32) is Rounding.NEAREST
    assert rounding(is_cuda=True) is Rounding.NEAREST
    assert rounding(lora=LoraSection(rank=4), engine_dtype="bfloat16") is Rounding.NEAREST


def test_a_run_keeps_the_rounding_of_its_first_start(stored: Path, tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    model = make_model()
    model.name_or_path = str(stored)
    settings = {"is_repeatable": True, "max_seq_tokens": 64, "num_cores": 1}
    slow = LearnerSection(precision=BF16, lr=1e-6)
    assert choose_compute(slow, model, file, **settings).rounding is Rounding.STOCHASTIC
    fast = LearnerSection(precision=BF16, lr=1e-2)
    assert choose_compute(fast, model, file, **settings).rounding is Rounding.STOCHASTIC


def test_adapters_train_in_fp32_on_a_cpu(stored: Path) -> None:
    lora = LoraSection(rank=4)
    for folder in (stored, None):
        assert chosen(folder, lora=lora, lr=1e-2).precision is FP32
        assert chosen(folder, lora=lora, lr=1e-2, is_cuda=True).precision is BF16


@pytest.mark.parametrize(
    ("engine_dtype", "expected"), [("float32", FP32), ("bfloat16", BF16), ("float16", BF16)]
)
@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize("target", ["q_proj", "experts"])
def test_adapters_have_the_precision_of_the_engines(
    stored: Path, engine_dtype: str, expected: Precision, is_cuda: bool, target: str
) -> None:
    keys: dict[str, Any] = {"lora": LoraSection(rank=4, targets=[target]), "lr": 1e-4}
    choice = chosen(stored, **keys, is_cuda=is_cuda, engine_dtype=engine_dtype)
    assert choice.precision is expected
    whole = chosen(stored, lr=1e-4, is_cuda=is_cuda, engine_dtype=engine_dtype)
    assert whole.precision is chosen(stored, lr=1e-4, is_cuda=is_cuda).precision
    # A pass in fp32 shows updates that engines in 16 bits round away.
    is_apart = whole.precision is FP32 and engine_dtype != "float32"
    assert is_apart == whole.reason.endswith("set model.dtype=float32")


@pytest.mark.parametrize(
    ("precision", "engine_dtype", "remedies"),
    [
        (BF16, "float32", r"model\.dtype=bfloat16, or learner\.precision=fp32"),
        (FP32, "bfloat16", r"model\.dtype=float32, or learner\.precision=bf16"),
    ],
)
def test_adapters_in_another_precision_than_the_engines_are_refused(
    tmp_path: Path, precision: Precision, engine_dtype: str, remedies: str
) -> None:
    lora = LoraSection(rank=4)
    with pytest.raises(ConfigError, match=rf"model\.dtype={engine_dtype} and .*{remedies}"):
        chosen(None, precision=precision, lora=lora, engine_dtype=engine_dtype)
    merged = LoraSection(rank=4, targets=["experts"])
    for other in ({"lora": merged}, {}):  # Engines receive weights, and add nothing.
        keys: dict[str, Any] = {"precision": precision, **other}
        assert chosen(None, **keys, engine_dtype=engine_dtype).precision is precision
    # A later start with other engines keeps the precision of the first one.
    file = tmp_path / "precision.json"
    settings: dict[str, Any] = {"is_repeatable": True, "max_seq_tokens": 64, "num_cores": 1}
    first = LearnerSection(device="cpu", precision=precision, lora=lora)
    same = "bfloat16" if precision is BF16 else "float32"
    choose_compute(first, make_model(), file, **settings, engine_dtype=same)
    later = LearnerSection(device="cpu", lora=lora)
    with pytest.raises(ConfigError, match=remedies):
        choose_compute(later, make_model(), file, **settings, engine_dtype=engine_dtype)


def test_adapters_in_bf16_engines_need_bf16_units(stored: Path) -> None:
    keys: dict[str, Any] = {"lora": LoraSection(rank=4), "has_units": False}
    assert chosen(stored, **keys, engine_dtype="float32").precision is FP32
    with pytest.raises(ConfigError, match=r"model\.dtype=float32"):
        chosen(stored, **keys, engine_dtype="bfloat16")


def test_rule_follows_the_device_without_such_a_checkpoint(stored: Path) -> None:
    assert chosen(None, lr=1e-6).precision is BF16
    assert chosen(stored, lr=1e-2, has_units=False).precision is FP32
    assert chosen(stored, lr=1e-2, is_cuda=True, has_units=False).precision is FP32
    assert chosen(stored, lr=1e-6, precision=BF16)[:2] == (BF16, "learner.precision is set")


def test_dry_run_names_the_precision_of_each_training(stored: Path) -> None:
    sft = SftSection(lr=3e-5, muon_lr=1e-3, from_scratch=False)
    model = ModelSection(path=str(stored))
    learner = LearnerSection(device="cpu")
    made = {
        "train": RunConfig(model=model, learner=learner),
        "sft": SftConfig(model=model, learner=learner, sft=sft),
        "dpo": DpoConfig(model=model, learner=learner),
        "evolve": EvolveConfig(model=model, learner=learner, sft=sft),
    }
    for command, cfg in made.items():
        line, *_ = rate_lines(command, cfg)
        assert line.startswith("learner.precision: fp32 (")
    assert rate_lines("eval", made["train"]) == []


def test_report_reads_the_precision_and_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    assert recorded_precision(file) == ""
    file.write_text('{"precision": "fp32", "precision_reason": "it is set"}', encoding="utf-8")
    assert recorded_precision(file) == "fp32 (it is set)"
