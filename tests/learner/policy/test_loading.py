"""Laws of loading part by part: the weights of a whole load, in the memory of a part."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM

from common.config.algorithm import Advantage, AlgorithmSection
from common.config.learner import CriticKind, CriticSection, LearnerSection, LoraSection, Precision
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.memory import trim_heap
from learner.policy.forward import Networks, Passes
from learner.policy.loading import fill, give_memory, is_unloaded
from learner.policy.model import load_policy
from learner.policy.sharding import shard
from learner.training.build import load_start, make_trainer
from learner.training.rank_workers import RankWorkers
from tests.learner.builders import make_model, run_config_with_policy

CPU = torch.device("cpu")
ALL = AlgorithmSection(kl_coef=0.1, advantage=Advantage.PPO)
OF_ITS_OWN = CriticSection(kind=CriticKind.MODEL)


@contextmanager
def trainer_of(cfg: RunConfig) -> Iterator[Any]:
    """Yield the trainer of rank 0 of one, or of several with their processes."""
    workers = RankWorkers(cfg, None)
    try:
        model, _ = load_start(cfg, None, CPU)
        workers.wait_loaded()
        ranks = workers.join(cfg.learner)
        yield make_trainer(cfg, model, None, ranks=ranks, announce=workers.announce)[0]
    finally:
        workers.stop()


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's parts of all weights, and the constants, by network and name."""
    networks = trainer._gradients._networks
    found: dict[str, torch.Tensor] = {}
    for kind in ("policy", "critic", "reference"):
        network = getattr(networks, kind)
        named = [] if network is None else [*network.named_parameters(), *network.named_buffers()]
        found |= {f"{kind}.{name}": each.detach() for name, each in named}
    return found


def check_halves(parts: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that rank 0 of two has its half of each sharded weight, and the others as a whole."""
    assert parts.keys() == expected.keys()
    assert any("reference" in name for name in parts)
    assert any(isinstance(part, DTensor) for part in parts.values())
    for name, part in parts.items():
        want = expected[name]
        if isinstance(part, DTensor):
            part, want = part.to_local(), want[: (len(want) + 1) // 2]
        assert torch.equal(part, want), name


@pytest.mark.long  # The ranks of test_rank_workers.py load in this way, too.
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_sharded_loading_equals_a_whole_load(tmp_path: Path, rank: int) -> None:
    cfg = run_config_with_policy(
        tmp_path, lora=LoraSection(rank=rank), critic=OF_ITS_OWN, rank_timeout_s=60.0
    )
    make_model(seed=5).save_pretrained(tmp_path / "reference")
    algorithm = replace(ALL, reference_path=str(tmp_path / "reference"))
    cfg = replace(cfg, algorithm=algorithm)
    with trainer_of(cfg) as single:
        expected = weights_of(single)
    two = replace(cfg, learner=replace(cfg.learner, num_ranks=2))
    with trainer_of(two) as sharded:
        check_halves(weights_of(sharded), expected)


def test_frozen_reference_keeps_its_matrices_in_the_requested_dtype(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    how: dict[str, Any] = {"device": "cpu", "is_frozen": True}
    model = load_policy(str(tmp_path), base_dtype=torch.bfloat16, **how)
    dtypes = {name: each.dtype for name, each in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".mlp." in name} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if "norm" in name} == {torch.float32}
    assert not any(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize(
    ("change", "said"), [("missing", "no \\*.safetensors file has"), ("shape", "requires")]
)
def test_weights_of_another_model_are_refused_by_name(
    tmp_path: Path, change: str, said: str
) -> None:
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    key = "num_hidden_layers" if change == "missing" else "intermediate_size"
    config[key] *= 2
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load_policy(str(tmp_path), device="cpu", is_skeleton=True)
    assert is_unloaded(model)
    give_memory(model, CPU)
    with pytest.raises(ConfigError, match=said):
        fill(model, str(tmp_path))


@contextmanager
def rank_of(size: int) -> Iterator[Any]:
    """Yield the mesh of the first of several ranks; the other ranks do not exist."""
    distributed: Any = dist
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield distributed.init_device_mesh("cpu", (size,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tied_weights_with_two_values_are_refused(tmp_path: Path, is_sharded: bool) -> None:
    """Transformers would leave them apart, and vLLM would drop the head."""
    tied = make_model(is_tied=True)
    tied.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    how: dict[str, Any] = {"device": "cpu"}

    def load(head: torch.Tensor) -> Any:
        save_file(weights | {"lm_head.weight": head}, file, metadata={"format": "pt"})
        model = load_policy(str(tmp_path), **how, is_skeleton=is_sharded)
        if is_sharded:
            with rank_of(2) as mesh:
                shard(model, mesh, dtype=torch.float32)
                fill(model, str(tmp_path))
        return model

    other = embedding.clone()
    other[-1, -1] += 1.0
    with pytest.raises(ConfigError, match=r"ties .*lm_head\.weight.*tie_word_embeddings=false"):
        load(other)
    same = load(embedding.clone())  # Some libraries write both.
    assert same.lm_head.weight is same.model.embed_tokens.weight


def peak_of(load: Callable[[], object]) -> int:
    """Return the peak growth of this process in bytes."""
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # Resets the peak memory.
    before = _status("VmRSS")
    kept = load()
    grown = _status("VmHWM") - before
    del kept
    return grown


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def test_loading_takes_the_memory_of_a_part(tmp_path: Path) -> None:
    """A quarter of the weights for one of four ranks, beside one weight as the file has it."""
    config = Qwen2Config(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=4096,
        dtype="bfloat16",
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    num_bytes = 4 * sum(each.numel() for each in model.parameters())
    largest = 4 * max(each.numel() for each in model.parameters())
    del model
    make_model().save_pretrained(tmp_path / "small")
    how: dict[str, Any] = {"device": "cpu"}

    def load_part(path: Path) -> object:
        network = load_policy(str(path), **how, is_skeleton=True)
        shard(network, mesh, dtype=torch.float32)
        fill(network, str(path))
        return network

    with rank_of(4) as mesh:
        load_part(tmp_path / "small")  # Imports do not count as memory of weights.
        part = peak_of(lambda: load_part(tmp_path))
    whole_load = peak_of(lambda: load_policy(str(tmp_path), **how))
    assert num_bytes > 100 << 20
    assert whole_load > 0.95 * num_bytes
    # Of the mapped file, half as wide, the pages of this part count, too.
    assert num_bytes / 4 < part < num_bytes / 4 * 1.5 + largest + (8 << 20)


def test_missing_weight_is_never_drawn_at_random(tmp_path: Path) -> None:
    whole = make_model()
    state = whole.state_dict()
    del state["lm_head.weight"]
    whole.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"has the weights of lm_head\.weight \(1 are missing\)"):
        load_policy(str(tmp_path), device="cpu")


@pytest.mark.parametrize("is_skeleton", [False, True])
def test_unknown_rotary_embedding_is_refused_by_name(tmp_path: Path, is_skeleton: bool) -> None:
    make_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("rope_parameters", None)
    config["rope_scaling"] = {"type": "ntk", "factor": 4.0}
    file.write_text(json.dumps(config), encoding="utf-8")
    how: dict[str, Any] = {"device": "cpu"}
    with pytest.raises(ConfigError, match=r"cannot load this checkpoint \(KeyError: 'ntk'\)"):
        load_policy(str(tmp_path), is_skeleton=is_skeleton, **how)


def test_head_in_fp32_is_scored_in_fp32(tmp_path: Path) -> None:
    """Engines in bf16 compute the logits in the dtype that config.json names."""
    make_model().save_pretrained(tmp_path)
    model: Any = load_policy(str(tmp_path), device="cpu")

    def dtype_of(named: str | None, engine: str) -> torch.dtype:
        model.config.head_dtype = named
        networks = Networks(policy=model)
        cfg = LearnerSection(device="cpu", precision=Precision.BF16)
        return Passes(cfg, networks, temperature=1.0, engine_dtype=engine).scoring.head_dtype

    assert dtype_of(None, "bfloat16") is torch.bfloat16
    assert dtype_of("model", "bfloat16") is torch.bfloat16
    assert dtype_of("float32", "bfloat16") is torch.float32
    assert dtype_of(None, "float32") is torch.float32


def test_layers_for_several_tokens_are_left_out(tmp_path: Path) -> None:
    """Checkpoints of DeepSeek-V3 and GLM have a layer after the last one of the network."""
    make_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    last = max(int(name.split(".")[2]) for name in weights if ".layers." in name)
    more = {
        name.replace(f".layers.{last}.", f".layers.{last + 1}."): torch.randn_like(each)
        for name, each in weights.items()
        if f".layers.{last}." in name
    }
    how: dict[str, Any] = {"device": "cpu"}
    plain: Any = load_policy(str(tmp_path), **how)
    save_file(weights | more, file, metadata={"format": "pt"})
    whole: Any = load_policy(str(tmp_path), **how)
    bare: Any = load_policy(str(tmp_path), **how, is_skeleton=True)
    give_memory(bare, CPU)
    fill(bare, str(tmp_path))
    expected = plain.state_dict()
    for found in (whole.state_dict(), bare.state_dict()):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_skeleton_has_constants_of_every_module(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    how: dict[str, Any] = {"device": "cpu"}
    whole: Any = load_policy(str(tmp_path), **how)
    bare: Any = load_policy(str(tmp_path), is_skeleton=True, **how)
    constants = dict(whole.named_non_persistent_buffers())
    # The embedding's factor is sqrt(hidden_size), and there are two rotary embeddings.
    assert constants["model.embed_tokens.embed_scale"].item() == pytest.approx(32**0.5)
    assert len(constants) > 2
    for name, expected in constants.items():
        assert torch.equal(bare.get_buffer(name), expected), name


def test_loaded_networks_never_use_cudnn_attention(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_policy(str(tmp_path), device="cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
