"""Laws of `actor.engine_args` against vLLM's own declaration."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config.actor import OWN_ENGINE_ARGS, ActorSection
from common.errors import ConfigError

pytestmark = pytest.mark.slow


def test_arguments_set_by_the_project_exist_in_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert OWN_ENGINE_ARGS.keys() <= AsyncEngineArgs.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    ("given", "law"),
    [
        (
            {"kv_cache_dtyp": "fp8"},
            r'dtyp="fp8": vLLM \S+ has no such argument; the nearest is kv_',
        ),
        ({"kv_cache_dtype": "fp9"}, r"refuses the value: Input should be 'auto', .*'fp8'"),
        ({"max_num_batched_tokens": "12"}, r'tokens="12": .*: Input should be a valid integer'),
        ({"max_num_batched_tokens": True}, r"tokens=true: .*: Input should be a valid integer"),
        ({"enable_expert_parallel": 1}, r"parallel=1: .*: Input should be a valid boolean"),
        ({"cpu_offload_gb": "2 GB"}, r"Input should be a valid number"),
        ({"attention_backend": "FLASH_ATN"}, r"the nearest value is FLASH_ATTN$"),
        ({"compilation_config": {"mod": 3}}, r"Unexpected keyword argument"),
        ({"_api_process_rank": 1}, r"has no such argument"),
    ],
)
def test_wrong_argument_is_refused_by_name_and_value(given: dict[str, Any], law: str) -> None:
    from actor.engine.arguments import as_declared

    with pytest.raises(ConfigError, match=law) as caught:
        as_declared(given)
    assert str(caught.value).startswith(f"actor.engine_args.{next(iter(given))}=")


def test_right_arguments_get_the_declared_types() -> None:
    from vllm.config import CompilationConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from actor.engine.arguments import as_declared

    given = {
        "attention_backend": "flash_attn",
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
        "cpu_offload_gb": 2,
        "cpu_offload_params": ["experts"],
        "kv_cache_dtype": "fp8",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "block_size": None,
    }
    found = as_declared(given)
    assert found["attention_backend"] is AttentionBackendEnum.FLASH_ATTN
    assert isinstance(found["compilation_config"], CompilationConfig)
    assert found["compilation_config"].cudagraph_mode.name == "FULL_DECODE_ONLY"
    assert found["cpu_offload_params"] == {"experts"}
    same = ("cpu_offload_gb", "kv_cache_dtype", "speculative_config", "block_size")
    assert all(found[name] == given[name] for name in same)


@pytest.mark.long
def test_check_before_the_start_refuses_a_near_miss() -> None:
    from actor.engine.arguments import check_engine_args

    check_engine_args({})  # Nothing is started.
    with pytest.raises(ConfigError, match=r"^actor\.engine_args\.block_sise=32: .*is block_size$"):
        check_engine_args({"block_sise": 32})


def test_engine_gets_its_arguments_and_automatic_eagerness(tmp_path: Path) -> None:
    from actor.engine.start import engine_arguments
    from common.config.model import ModelSection

    model = ModelSection(path=str(tmp_path))
    given = ActorSection(engine_args={"block_size": 64, "max_num_batched_tokens": 16_384})
    found = engine_arguments(model, given, seed=0, is_repeatable=True)
    assert (found.block_size, found.max_num_batched_tokens) == (64, 16_384)
    assert found.enforce_eager  # This machine computes on a CPU.
    chunks = ActorSection(engine_args={"enable_chunked_prefill": True})
    with pytest.raises(ConfigError, match="each prompt in one step"):
        engine_arguments(model, chunks, seed=0, is_repeatable=True)
    experts = ActorSection(engine_args={"enable_expert_parallel": True})
    with pytest.raises(ConfigError, match="needs all experts in each worker"):
        engine_arguments(model, experts, seed=0)


def test_config_that_vllm_rejects_is_refused_in_one_line(tmp_path: Path) -> None:
    from actor.engine.start import engine_arguments, engine_config
    from common.config.model import ModelSection

    tree = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1}
    text = json.dumps(tree | {"layer_types": ["odd"]})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    arguments = engine_arguments(ModelSection(path=str(tmp_path)), ActorSection(), seed=0)
    with pytest.raises(ConfigError, match=r"^vLLM refuses its arguments: .*layer_types.*$"):
        engine_config(arguments)
