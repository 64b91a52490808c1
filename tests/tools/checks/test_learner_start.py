"""Laws of the checks before a command starts."""

from pathlib import Path
from typing import Any

import pytest

import run
from common.errors import ConfigError
from common.repository import ROOT
from common.segments import RoutingShape
from tests.tools.checks.models import write_model
from tools.checks.role_starts import check_record

pytestmark = pytest.mark.slow  # torch and the environments load

STATEFUL = {"model_type": "recurrent_gemma", "lru_width": 896}
NO_PARTS = {"model_type": "opt", "word_embed_proj_dim": 896, "ffn_dim": 896}
SMALL = {"num_hidden_layers": 2, "vocab_size": 2000, "num_rest": 20_000_000}
SFT = ["sft", "--config", "smoke", "sft.from_scratch=false"]
DPO = ["dpo", "--config", "smoke"]
EVOLVE = ["evolve", "--config", "smoke"]
TRAIN = ["train", "--config", "smoke", "actor.kv_cache_gib=4"]
DRY = [*TRAIN, "--dry-run"]
COMMANDS = [
    pytest.param(each, id=f"{each[0]}{each[-1]}") for each in (SFT, DPO, EVOLVE, TRAIN, DRY)
]


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, argv: list[str], **model: Any) -> str:
    """Return the error of a command that must start nothing, which makes no run directory."""
    if model:
        path = write_model(folder / "model", **SMALL, **model)
        argv = [*argv, f"model.path={path}"]
    capsys.readouterr()
    assert run.main([*argv, f"run.dir={folder / 'runs'}", "run.name=none"]) == 2
    assert not (folder / "runs").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize("argv", COMMANDS)
def test_impossible_layout_is_refused_before_start(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, tmp_path, [*argv, "learner.layout=packed"], **STATEFUL)
    assert "learner.layout=packed: RecurrentGemmaRecurrentBlock keeps its state in itself" in error
    assert "learner.layout=padded" in error


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"model_type": "qwen2"}, "sequence_ranks=4: the model has 14 attention heads"),
        (
            STATEFUL,
            "sequence_ranks=4 divides packed rows: RecurrentGemmaRecurrentBlock keeps its state",
        ),
    ],
)
def test_rows_that_ranks_cannot_divide_start_nothing(
    model: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*DRY, "learner.num_ranks=4", "learner.sequence_ranks=4"]
    error = refusal(capsys, tmp_path, argv, **model)
    assert f"learner.{said}" in error


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"model_type": "qwen2"}, "Qwen2ForCausalLM has no experts in stacked weights"),
        (
            {"model_type": "qwen2_moe", "num_experts": 6},
            "Qwen2MoeExperts has 6 experts, which is no multiple of it. Use a divisor of 6",
        ),
        (
            {"model_type": "llama4_text", "num_local_experts": 4},
            "Llama4TextExperts takes other inputs than states, chosen experts and their gates",
        ),
    ],
)
def test_experts_that_ranks_cannot_divide_start_nothing(
    model: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*DRY, "learner.num_ranks=4", "learner.expert_ranks=4"]
    error = refusal(capsys, tmp_path, argv, **model)
    assert f"learner.expert_ranks=4: {said}" in error


@pytest.mark.parametrize("argv", [SFT, DRY])
def test_compilation_without_parts_is_refused_before_the_start(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, tmp_path, [*argv, "learner.compile=true"], **NO_PARTS)
    assert "learner.compile=true: OPTForCausalLM has no RMSNorm and no MLP" in error
    assert "learner.compile=false" in error


@pytest.mark.parametrize("argv", COMMANDS)
def test_adapters_of_unknown_layers_start_nothing(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = ["learner.lora.rank=4", "learner.lora.targets=[q_proj,nothing]"]
    own = ["learner.optimizer=adamw"]
    error = refusal(capsys, tmp_path, [*argv, *own, *lora], model_type="qwen2")
    assert "learner.lora.targets=nothing" in error


def test_adapters_from_scratch_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sft", "--config", "smoke", "sft.from_scratch=true"]
    argv += ["learner.lora.rank=4", "learner.optimizer=adamw"]
    error = refusal(capsys, tmp_path, [*argv, f"sft.output={tmp_path / 'made'}"])
    assert "learner.lora.rank=4: sft.from_scratch=true" in error


@pytest.mark.parametrize(
    ("argv", "context"),
    [
        (["train"], "window"),
        (["train", "--dry-run"], "summary"),
        (["eval"], "fold"),
        (["evolve"], "subagent"),
    ],
)
def test_too_small_context_is_refused_before_the_start(
    argv: list[str], context: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*argv, "--config", "smoke", f"actor.context={context}", "actor.max_turn_tokens=24"]
    given += [f"model.path={ROOT}/configs/policies/tiny", "learner.optimizer=adamw"]
    error = refusal(capsys, tmp_path, [*given, "actor.max_model_len=32"])
    assert f"actor.max_model_len=32: no observation fits with actor.context={context}" in error
    assert "actor.max_turn_tokens=24" in error
    least = int(error.split("actor.max_model_len=")[2].split()[0])
    assert run.main([*given[:1], "--dry-run", *given[1:], f"actor.max_model_len={least}"]) == 0
    error = refusal(capsys, tmp_path, [*given, f"actor.max_model_len={least - 1}"])
    assert f"use at least actor.max_model_len={least}" in error


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algorithm.routing_replay=true", "Qwen2Model has no experts"),
        ("algorithm.router_aux_coef=0.1", "no load-balancing loss for Qwen2ForCausalLM"),
    ],
)
def test_routers_of_a_dense_policy_are_refused_before_the_start(
    setting: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, tmp_path, [*DRY, setting], model_type="qwen2")
    assert setting.partition("=")[0] in error
    assert said in error


def test_context_whose_experts_no_message_holds_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"model_type": "qwen3_moe", "num_experts": 512, "num_experts_per_tok": 512}
    model |= {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    model |= {"moe_intermediate_size": 1}
    sizes = ["actor.max_model_len=16385", "learner.max_tokens_per_microbatch=16385"]
    error = refusal(capsys, tmp_path, [*DRY, "algorithm.routing_replay=true", *sizes], **model)
    assert "actor.max_model_len=16385: with algorithm.routing_replay=true" in error
    assert "2,048 bytes" in error  # 2 layers x 512 experts x 2 bytes.
    assert "Use at most actor.max_model_len=16384" in error


@pytest.mark.parametrize(("num_experts", "most"), [(128, 87_381), (512, 43_690)])
def test_record_of_the_longest_context_fits_into_a_frame(num_experts: int, most: int) -> None:
    routing = RoutingShape(num_layers=48, num_chosen=8, num_experts=num_experts)
    check_record(routing, most)
    with pytest.raises(ConfigError, match=f"Use at most actor.max_model_len={most}"):
        check_record(routing, most + 1)
