"""Laws of versions made ready beside generation: a swap gives what vLLM's own reload gives."""

import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from transformers import Mamba2Config, Mamba2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.conformance.networks import save_family
from benchmarks.conformance.part_results import Verdict, read
from benchmarks.conformance.suite import RESULTS
from common.config.actor import ActorSection
from common.config.model import ModelSection
from common.weights.buckets import CPU, BucketLayout, send_buckets
from common.weights.messages import TensorSpec, WeightsOffer
from common.weights.transport import BroadcastGroup, CollectiveMember
from learner.policy.composite import source_of
from learner.policy.model import load_policy
from learner.weights.source import policy_weights
from tests.actor.engine.engine_rig import HOST, PATIENT_S, freeze_heap, save_tiny_policy
from tests.common.weights.meeting import Meeting
from tests.learner.builders import tensors_of
from tests.marks import long_for
from tools.offline.scratch import make_tokenizer, save_policy

pytestmark = pytest.mark.slow

TENSOR_BYTES, NUM_TENSORS = 16 << 20, 6
FAMILIES = sorted(  # Those that the engine runs in fp32.
    {
        family
        for family, result in read(RESULTS).items()
        if "rollout" in result.parts and result.parts["rollout"].verdict is Verdict.RIGHT
    }
    | {"gemma3"}
)
USUAL = ("gpt2", "gemma3")  # The tied head of Gemma 3 lies in the language model of a composite.
KINDS = ("float32", "bfloat16 tied", "bfloat16 biased")
IN_BF16 = [  # Those that the engine runs at all.
    family
    for family, result in read(RESULTS).items()
    if "rollout" in result.parts
    and result.parts["rollout"].verdict in (Verdict.RIGHT, Verdict.ROUNDED)
]


def save_biased_policy(folder: Path) -> None:
    """Write a Qwen2, which has biases and no norms of queries and keys."""
    tokenizer = make_tokenizer(["go to the red ball"], vocab_size=320)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    save_policy(folder, Qwen2ForCausalLM(config), tokenizer)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """What vLLM's layers ask for while they are made, and nothing of it afterwards."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.utils.network_utils import get_open_port

    address = f"tcp://{HOST}:{get_open_port()}"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    freeze_heap()
    yield
    parallel_state.cleanup_dist_env_and_memory()


def make_model(path: Path, dtype: str) -> tuple[Any, Any]:
    """Return vLLM's model of a checkpoint and its configuration, without an engine."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models.transformers import base

    from actor.engine.start import engine_arguments, engine_config

    cfg = ActorSection(max_concurrent=4, max_model_len=128)
    arguments = engine_arguments(ModelSection(path=str(path), dtype=dtype), cfg, seed=0)
    arguments.weight_transfer_config = None
    config = engine_config(arguments)
    with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's CPU worker does
        # It would change classes of transformers for the rest of this process.
        patch.setattr(base, "support_torch_compile", lambda **_: lambda cls: cls)
        return get_model(vllm_config=config), config


def version(path: Path, dtype: str, *, seed: int) -> list[tuple[str, Tensor]]:
    """Return the tensors of a checkpoint by name, with other numbers in them."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    kept = load_file(path / "model.safetensors")
    return [
        (name, torch.randn(each.shape, generator=generator).to(getattr(torch, dtype)))
        for name, each in kept.items()
    ]


def filled(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model without its towers of images, which have no memory."""
    state = model.state_dict(keep_vars=True)
    return {name: each for name, each in state.items() if not each.is_meta}


def contents(model: nn.Module, dtype: str) -> dict[str, Tensor]:
    """Return every tensor of a model, and what each packed matrix makes of the same input."""
    found = {name: each.clone() for name, each in filled(model).items()}
    generator = torch.Generator().manual_seed(0)
    layers: list[tuple[str, Any]] = list(model.named_modules())
    for name, layer in layers:
        if hasattr(layer, "cpu_linear"):
            width = getattr(layer, "input_size_per_partition", None) or getattr(
                layer, "input_size", None
            )
            width = width or layer.embedding_dim
            rows = torch.randn((5, width), generator=generator).to(getattr(torch, dtype))
            found[f"{name}()"] = layer.cpu_linear(rows, layer.weight, getattr(layer, "bias", None))
    return found


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stored_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in the weight files of a folder."""
    from safetensors.torch import load_file

    return {
        name: each
        for path in sorted(folder.glob("*.safetensors"))
        for name, each in load_file(path).items()
    }


@torch.no_grad()
@pytest.mark.parametrize("family", long_for(FAMILIES, [f for f in FAMILIES if f not in USUAL]))
def test_reload_leaves_no_weight_old(tmp_path: Path, family: str) -> None:
    """The sinks of gpt-oss have no weight loader, and GPT-2 has layer norms with biases."""
    from vllm.config import set_current_vllm_config

    from actor.engine.load import Prepared, begin_reload, can_prepare, end_reload

    for seed in (0, 1):
        save_family(family, tmp_path / str(seed), seed=seed)
    weights = stored_in(tmp_path / "1")
    expected = contents(make_model(tmp_path / "1", "float32")[0], "float32")
    model, config = make_model(tmp_path / "0", "float32")
    assert not is_equal(contents(model, "float32"), expected)
    with set_current_vllm_config(config):
        begin_reload(model)
        model.load_weights(weights.items())
        end_reload(model, config.model_config)
    assert is_equal(contents(model, "float32"), expected)
    swapped, config = make_model(tmp_path / "0", "float32")
    if can_prepare(swapped, config, CPU):
        prepared = Prepared(swapped, config)
        prepared.load(weights.items())
        prepared.swap()
        assert is_equal(contents(swapped, "float32"), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "family", long_for(IN_BF16, [each for each in IN_BF16 if each not in ("glm4_moe", "mamba2")])
)
def test_published_weights_lose_nothing_in_a_bf16_engine(tmp_path: Path, family: str) -> None:
    """GLM-4 MoE has routers and their correction, Mamba 2 decay rates and convolutions."""
    from safetensors.torch import save_file

    path = save_family(family, tmp_path / "exact")
    expected = filled(make_model(path, "bfloat16")[0])
    policy = load_policy(str(path), device="cpu")
    sent = tensors_of(policy_weights(policy, torch.bfloat16))
    stored = stored_in(path)
    assert sent.keys() <= stored.keys()
    assert source_of(policy) is not None or sent.keys() == stored.keys()
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(stored | sent, path / "model.safetensors", metadata={"format": "pt"})
    found = filled(make_model(path, "bfloat16")[0])
    differ = {name for name, each in expected.items() if not torch.equal(each, found[name])}
    assert differ == set()
    assert found.keys() == expected.keys()
    assert torch.float32 in {each.dtype for each in found.values()}


@torch.no_grad()
@pytest.mark.parametrize("dtype", long_for(["float32", "bfloat16"], ["float32"]))
def test_reload_renews_the_convolutions_of_mamba(tmp_path: Path, dtype: str) -> None:
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config

    from actor.engine.load import begin_reload, can_prepare, end_reload

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "state_size": 32,
    }
    for seed in (0, 1):
        torch.manual_seed(seed)
        network = Mamba2ForCausalLM(Mamba2Config(vocab_size=320, num_hidden_layers=1, **sizes))
        tokenizer = make_tokenizer(["go to the red ball"], vocab_size=320)
        save_policy(tmp_path / str(seed), network, tokenizer)
    model, config = make_model(tmp_path / "0", dtype)
    expected, _ = make_model(tmp_path / "1", dtype)
    assert not can_prepare(model, config, CPU), "a swap would leave the convolutions old"
    with set_current_vllm_config(config):
        begin_reload(model)
        model.load_weights(load_file(tmp_path / "1" / "model.safetensors").items())
        end_reload(model, config.model_config)
    found = dict(model.named_buffers())
    right = dict(expected.named_buffers())
    assert any(name.endswith("conv_weights") for name in right)
    assert {name for name, each in right.items() if not torch.equal(each, found[name])} == set()
    renewed = contents(model, dtype)
    differ = {k for k, v in contents(expected, dtype).items() if not torch.equal(v, renewed[k])}
    assert differ == set()


@torch.no_grad()
@pytest.mark.parametrize("kind", long_for(KINDS, ["bfloat16 tied"]))
def test_prepared_weights_equal_a_reload_exactly(tmp_path: Path, kind: str) -> None:
    from actor.engine.load import Prepared, begin_reload, can_prepare, end_reload

    dtype, _, way = kind.partition(" ")
    path = tmp_path / "policy"
    if way == "biased":
        save_biased_policy(path)
    else:
        save_tiny_policy(path, is_tied=way == "tied")
    (reloaded, config), (swapped, _) = make_model(path, dtype), make_model(path, dtype)
    assert can_prepare(swapped, config, CPU)
    addresses = {id(each) for each in swapped.parameters()}
    before = contents(swapped, dtype)
    assert any(name.endswith("qkv_proj()") for name in before)
    assert any(name.endswith("lm_head()") for name in before)
    for seed in (1, 2, 3):
        tensors = version(path, dtype, seed=seed)
        if seed == 2:  # an update that ends in the middle, after which the next one is whole
            begin_reload(reloaded)
            reloaded.load_weights(version(path, dtype, seed=9)[: len(tensors) // 2])
            end_reload(reloaded, config.model_config)
        begin_reload(reloaded)
        reloaded.load_weights(tensors)
        end_reload(reloaded, config.model_config)
        prepared = Prepared(swapped, config)
        thread = threading.Thread(target=prepared.load, args=(tensors,))
        thread.start()
        thread.join()
        assert is_equal(contents(swapped, dtype), before), "the model goes on as it is"
        prepared.swap()
        after = contents(swapped, dtype)
        assert is_equal(after, contents(reloaded, dtype))
        assert not is_equal(after, before)
        before = after
    assert {id(each) for each in swapped.parameters()} == addresses


def test_layers_with_external_state_reload_in_place(tmp_path: Path) -> None:
    from actor.engine.load import can_prepare

    save_tiny_policy(tmp_path, is_tied=False)
    model, config = make_model(tmp_path, "float32")
    assert not can_prepare(model, config, torch.device("cuda"))
    layer = model.model.layers[0].mlp.down_proj
    method, layer.quant_method = layer.quant_method, object()
    assert not can_prepare(model, config, CPU)
    layer.quant_method = method
    assert can_prepare(model, config, CPU)
    model.register_buffer("view", model.model.norm.weight.view(-1), persistent=False)
    assert not can_prepare(model, config, CPU), "a swap would leave the view old"
    del model.view
    config.model_config.enforce_eager = False
    assert not can_prepare(model, config, CPU)


def test_prepared_and_staged_weights_share_one_copy() -> None:
    from actor.weights.stage import Staging

    total_bytes = TENSOR_BYTES * NUM_TENSORS
    sent = torch.randint(256, (total_bytes,), dtype=torch.uint8)
    process, rss = psutil.Process(), [0, 0]
    kept: list[Tensor] = []

    def prepare(tensors: Iterable[tuple[str, Tensor]]) -> None:
        rss[0] = process.memory_info().rss
        for number, (name, tensor) in enumerate(tensors):
            part = sent[number * TENSOR_BYTES : (number + 1) * TENSOR_BYTES]
            assert (name, torch.equal(tensor, part)) == (str(number), True)
            if number == 1:
                kept.append(tensor[7:].view(-1))
        rss[1] = process.memory_info().rss

    store = Meeting()
    specs = [
        TensorSpec(
            name=str(n),
            shape=[TENSOR_BYTES],
            dtype="uint8",
            offset_bytes=n * TENSOR_BYTES,
            num_bytes=TENSOR_BYTES,
        )
        for n in range(NUM_TENSORS)
    ]
    offer = make_offer(store, specs, total_bytes)
    staging = Staging(CPU, prepare)
    staging.begin(offer)
    group = BroadcastGroup(store.store(), CollectiveMember(0, 2, "gloo", PATIENT_S, HOST), epoch=1)
    cut = BucketLayout(total_bytes, offer.bucket_bytes)
    slots = [torch.zeros(cut.slot_bytes, dtype=torch.uint8) for _ in range(2)]
    send_buckets(group, cut, slots, lambda start, part: part.copy_(sent[start:][: part.numel()]))
    deadline = time.monotonic() + PATIENT_S
    while not staging.state().is_done and time.monotonic() < deadline:
        time.sleep(0.01)
    group.close()
    staging.leave()
    assert (staging.state().is_done, staging.state().error) == (True, "")
    assert rss[0] - rss[1] > (NUM_TENSORS - 2.5) * TENSOR_BYTES, "all but the last and the kept"
    assert torch.equal(kept[0], sent[TENSOR_BYTES + 7 : 2 * TENSOR_BYTES])


def make_offer(meeting: Meeting, specs: list[TensorSpec], total_bytes: int) -> WeightsOffer:
    return WeightsOffer(
        version=1,
        group_epoch=1,
        rank=1,
        world_size=2,
        **meeting.of_offer(),
        transport="gloo",
        folder="",
        timeout_s=PATIENT_S,
        tensors=specs,
        total_bytes=total_bytes,
        bucket_bytes=TENSOR_BYTES,
        canary_token_ids=[],
    )


def test_partial_loaders_of_weights_have_a_name() -> None:
    from actor.engine.load import begin_reload

    loaded: list[str] = []

    def load(kind: str, parameter: Tensor, weight: Tensor) -> None:
        loaded.append(kind)
        parameter.data.copy_(weight)

    layer = nn.LayerNorm(2)
    layer.weight.weight_loader = partial(load, "norm")  # pyright: ignore
    begin_reload(nn.Sequential(layer))  # vLLM stops here at a loader without a name.
    layer.weight.weight_loader(layer.weight, torch.ones(2))  # pyright: ignore
    assert loaded == ["norm"]
