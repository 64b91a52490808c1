"""Laws of attention over packed sequences."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from common.config.learner import Attention, Layout
from common.errors import ConfigError
from learner.batch.batching import collate_tokens
from learner.batch.packing import Packing, pack, packed_rows
from learner.policy.kernels import attention as under_test
from learner.policy.kernels.attention import use_attention
from learner.policy.model import Scoring, flat_hidden, load_policy, token_logprobs
from tests.learner.builders import VOCAB, make_model

# Below, at and beyond a chunk of queries; 768 in all, so that the row is not filled up.
LENGTHS = (1, 200, 2, 128, 129, 308)
KERNELS = {"fused": under_test._fused, "products": under_test._products}
# Torch's fused kernel keeps sums of exponentials in fp32 for its backward pass.
TOLERANCE = {"fused": 1e-5, "products": 1e-10}
HEADS, KV_HEADS, SIZE = 4, 2, 8
EXACT = Scoring(chunk_tokens=512, dtype=torch.float32)


def packing_of(lengths: tuple[int, ...]) -> Packing:
    _, parts, _ = packed_rows([np.zeros(length) for length in lengths], ())
    return pack(parts, "cpu")


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key and value as a model hands them over: views of [1, seq, head, size]."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, sum(LENGTHS), heads, SIZE, generator=generator, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def pairs(window: int | None) -> Tensor:
    """Return whether a query attends to a key, [query, key] bool."""
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (owner[:, None] == owner[None]).tril()
    at = torch.arange(len(owner))
    return mask if window is None else mask & (at[None] > at[:, None] - window)


def block_masked(query: Tensor, key: Tensor, value: Tensor, *, window: int | None) -> Tensor:
    """Return attention with one mask over all pairs, [1, seq, head, size]."""
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    scores = (query @ keys.transpose(2, 3) * 0.3).masked_fill(~pairs(window), float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2)


def run(kernel: Any, tensors: list[Tensor], window: int | None) -> Tensor:
    module = torch.nn.Identity()
    more: dict[str, Any] = {"packing": packing_of(LENGTHS), "sliding_window": window}
    return kernel(module, *tensors, None, scaling=0.3, **more)[0]


@pytest.mark.parametrize("window", [None, 1, 7, 128, 150, 1_000])
@pytest.mark.parametrize("name", KERNELS)
def test_packed_kernels_equal_one_block_mask(name: str, window: int | None) -> None:
    ours, theirs = inputs(), inputs()
    weights = torch.linspace(-1, 1, sum(LENGTHS) * HEADS * SIZE, dtype=torch.float64)
    found = run(KERNELS[name], ours, window)
    expected = block_masked(*theirs, window=window)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    (found.flatten() * weights).sum().backward()
    (expected.flatten() * weights).sum().backward()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=TOLERANCE[name], rtol=0)


ADDITIONS: dict[str, dict[str, Any]] = {
    "sinks": {"has_sinks": True},
    "a cap": {"cap": 0.5},
    "both, in a window": {"has_sinks": True, "cap": 2.0, "window": 150},
}


@pytest.mark.parametrize("value_size", [SIZE, 12])
@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_apply_additions_to_the_formula(name: str, addition: str, value_size: int) -> None:
    """Sinks, caps, and values of another size than keys; scores and all gradients."""
    settings = dict(ADDITIONS[addition])
    window = settings.pop("window", None)
    cap = settings.pop("cap", None)
    found: list[list[Tensor]] = []
    for is_ours in (True, False):
        query, key, value = inputs()
        wide = torch.cat([value, value], -1)[..., :value_size].detach().requires_grad_()
        sinks = torch.tensor([-1.0, 0.5, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
        used = sinks if settings else None
        if is_ours:
            kernel = KERNELS[name]
            more: dict[str, Any] = {"packing": packing_of(LENGTHS), "sliding_window": window}
            module: Any = torch.nn.Identity()
            if cap:
                module.config = AutoConfig.for_model(
                    "gemma2", **FAMILY_SIZES, attn_logit_softcapping=cap
                )
                module.config.layer_types = None
                module.config.sliding_window = window
            more |= {"softcap": cap, "s_aux": used}
            out = kernel(module, query, key, wide, None, scaling=0.3, **more)[0]
        else:
            out = with_additions(query, key, wide, window=window, cap=cap, sinks=used)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64)
        (out.flatten() * weights).sum().backward()
        leaves = [query, key, wide, *([sinks] if settings else [])]
        found.append([out.detach(), *(cast(Tensor, each.grad) for each in leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[name], rtol=0)


def with_additions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention with one mask over all pairs, a cap on scores, and a sink."""
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    scores = query @ keys.transpose(2, 3) * 0.3
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~pairs(window), float("-inf")).exp()
    total = scores.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp().view(1, -1, 1, 1)
    return (scores / total @ values).transpose(1, 2)


@pytest.mark.parametrize("size", [1, 7, 128, 150, 1_000])
@pytest.mark.parametrize("name", KERNELS)
def test_chunks_end_attention_at_their_multiples(name: str, size: int) -> None:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    chunks = positions // size
    mask = pairs(None) & (chunks[:, None] == chunks[None])
    module = torch.nn.Identity()
    config: Any = AutoConfig.for_model("llama4_text", **FAMILY_SIZES)
    config.layer_types, config.attention_chunk_size = ["chunked_attention"], size
    module.config, module.layer_idx = config, 0  # pyright: ignore[reportArgumentType]
    query, key, value = inputs()
    found = KERNELS[name](
        module, query, key, value, None, scaling=0.3, packing=packing_of(LENGTHS)
    )[0]
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    scores = (query @ keys.transpose(2, 3) * 0.3).masked_fill(~mask, float("-inf"))
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


def test_chunks_count_the_positions_of_a_shared_prefix() -> None:
    # The prefix has keys 0 to 2; two tails of two queries follow, at positions 3 and 4.
    parts = [(3, np.arange(3)), (2, np.arange(5)), (2, np.array([0, 1, 2, 5, 6]))]
    chunked = pack(parts, "cpu").chunked(2)
    assert chunked.lengths == (2, 1, 1, 1, 1, 1)
    assert chunked.key_rows is not None
    pieces = chunked.key_rows.split(list(chunked.key_lengths))
    assert [each.tolist() for each in pieces] == [[0, 1], [2], [2, 3], [4], [2, 5], [6]]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_round_no_more_than_the_models_attention(name: str) -> None:
    model = make_model()
    sequences = [np.arange(n) * 7 % VOCAB for n in (40, 3, 25)]
    masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
    hidden: dict[str, Tensor] = {}
    for kind, dtype, is_packed in (
        ("exact", torch.float32, False),
        ("own", torch.bfloat16, False),
        (name, torch.bfloat16, True),
    ):
        layout = Layout.PACKED if is_packed else Layout.PADDED
        use_attention([model], "cpu", layout, Attention(name if is_packed else "products"))
        tokens = collate_tokens(sequences, masks, device="cpu", is_packed=is_packed)
        with torch.no_grad():
            rows = flat_hidden(model.base_model, tokens, dtype=dtype)
            hidden[kind] = rows[tokens.source_rows].float()
    own, ours = ((hidden[kind] - hidden["exact"]).norm() for kind in ("own", name))
    assert 0 < ours < 1.3 * own


def test_each_query_runs_once_with_at_most_128_in_a_block() -> None:
    asked = [block.queries for block in packing_of(LENGTHS).blocks(None)]
    assert [row for each in asked for row in range(each.start, each.stop)] == list(range(768))
    assert len(asked) == 10  # 200 and 129 have two blocks, 308 has three.
    assert max(each.stop - each.start for each in asked) == 128


def test_long_rows_use_few_padded_sizes() -> None:
    sequences = [np.full(length, 7) for length in (300, 290)]
    masks = [np.arange(len(each)) >= len(each) - 5 for each in sequences]
    tokens = collate_tokens(sequences, masks, device="cpu", is_packed=True)
    packing = tokens.packing
    assert packing is not None
    assert tokens.token_ids.shape == (1, 640)
    assert packing.lengths == (300, 290, 50)
    read = torch.cat([tokens.source_rows, tokens.last_rows])
    assert int(read.max()) == 589


def test_no_sequence_sees_another_in_its_row() -> None:
    model = make_model()
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    rng = np.random.default_rng(0)
    first, second, other = (rng.integers(0, VOCAB, size=20) for _ in range(3))
    masks = [np.arange(20) > 0] * 2

    def states(neighbour: np.ndarray) -> Tensor:
        tokens = collate_tokens([neighbour, second], masks, device="cpu", is_packed=True)
        return flat_hidden(model.base_model, tokens, dtype=torch.float32)[20:]

    assert states(first).equal(states(other))


FAMILY_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
ALTERNATING = {
    "num_hidden_layers": 2,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"num_hidden_layers": 2},
    "mixtral": {"num_hidden_layers": 1},
    "phi3": {"num_hidden_layers": 1},
    "starcoder2": {"num_hidden_layers": 1},
    "gemma3_text": ALTERNATING,
    "qwen3": ALTERNATING | {"use_sliding_window": True},
    "olmo3": ALTERNATING,
}


def windowed_model(family: str, window: int) -> Any:
    sizes = FAMILY_SIZES | WINDOWED[family] | {"sliding_window": window}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("family", WINDOWED)
def test_packed_sequences_longer_than_a_window_score_as_alone(family: str, name: str) -> None:
    model = windowed_model(family, window=8)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, size=length) for length in (30, 5, 140, 150)]
    sequences[2][:20] = sequences[0][:20]
    sequences[3][:100] = sequences[2][:100]
    sequences = [sequences[1], sequences[0], *sequences[2:]]
    masks = [np.arange(len(each)) >= min(90, len(each) - 4) for each in sequences]
    model.config._attn_implementation = "eager"
    expected = [
        model(input_ids=torch.from_numpy(sequence)[None]).logits[0].log_softmax(-1)
        for sequence in sequences
    ]
    assert use_attention([model], "cpu", Layout.AUTO, Attention(name))
    for shared in ((), (0, 0, 20, 100)):
        tokens = collate_tokens(sequences, masks, device="cpu", is_packed=True, shared=shared)
        logprobs = token_logprobs(model, tokens, EXACT)
        own = torch.cat(
            [
                each[np.flatnonzero(mask) - 1, ids[mask]]
                for each, ids, mask in zip(expected, sequences, masks, strict=True)
            ]
        )
        torch.testing.assert_close(logprobs, own, atol=1e-5, rtol=0)
    alone = collate_tokens(sequences[2:3], masks[2:3], device="cpu", is_packed=True)
    logprobs = token_logprobs(model, alone, EXACT)
    torch.testing.assert_close(logprobs, own[8:58], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_window_of_three_averages_three_values(name: str) -> None:
    # Equal scores: each output is the mean of the values that its query attends to.
    kernel: Any = KERNELS[name]
    values = torch.tensor([3.0, 6.0, 9.0, 12.0, 100.0, 200.0]).view(1, 1, 6, 1).expand(1, 1, 6, 8)
    zeros = torch.zeros(1, 1, 6, 8)
    packing = pack([(4, np.arange(4)), (2, np.arange(4, 6))], "cpu")
    out = kernel(
        torch.nn.Identity(),
        zeros,
        zeros,
        values,
        None,
        scaling=1.0,
        packing=packing,
        sliding_window=3,
    )[0]
    expected = torch.tensor([3.0, 4.5, 6.0, 9.0, 100.0, 150.0])
    torch.testing.assert_close(out[0, :, 0, 0], expected)


def test_queries_after_a_shared_prefix_attend_to_their_window() -> None:
    # The prefix has keys 0 to 2; two tails of two and one queries follow.
    parts = [(3, np.arange(3)), (2, np.arange(5)), (1, np.array([0, 1, 2, 5]))]
    blocks = pack(parts, "cpu").blocks(2)
    hidden = -torch.inf
    assert [
        block.keys if isinstance(block.keys, slice) else block.keys.tolist() for block in blocks
    ] == [slice(0, 3), slice(2, 5), [2, 5]]
    assert [each.hidden.tolist() for each in blocks] == [
        [[0, hidden, hidden], [0, 0, hidden], [hidden, 0, 0]],
        [[0, 0, hidden], [hidden, 0, 0]],
        [[0]],
    ]


def test_window_that_a_kernel_does_not_get_is_applied_by_the_layers() -> None:
    # The attention of Qwen2-MoE gives no window to its kernel, so only a mask can apply it.
    sizes = FAMILY_SIZES | ALTERNATING | {"num_experts": 2, "num_experts_per_tok": 1}
    config = AutoConfig.for_model(
        "qwen2_moe", **sizes, use_sliding_window=True, sliding_window=8, moe_intermediate_size=16
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    sequences = [np.arange(length) * 7 % VOCAB for length in (30, 21)]
    masks = [np.arange(len(each)) > 0 for each in sequences]
    assert use_attention([model], "cpu", Layout.AUTO, Attention.AUTO)
    packed = collate_tokens(sequences, masks, device="cpu", is_packed=True)
    logprobs = token_logprobs(model, packed, EXACT)
    assert not use_attention([model], "cpu", Layout.PADDED, Attention.AUTO)
    padded = collate_tokens(sequences, masks, device="cpu")
    torch.testing.assert_close(logprobs, token_logprobs(model, padded, EXACT), atol=1e-5, rtol=0)


def test_cap_that_a_kernel_does_not_get_is_refused() -> None:
    module = torch.nn.Identity()
    config: Any = AutoConfig.for_model("gemma2", **FAMILY_SIZES, num_hidden_layers=2)
    config.sliding_window = None
    module.config = config
    more: dict[str, Any] = {"scaling": 1.0, "packing": packing_of(LENGTHS)}
    for kernel in (cast(Any, each) for each in KERNELS.values()):
        with pytest.raises(ConfigError, match="softcap=None, unlike"):
            kernel(module, *inputs(torch.float32), None, **more)


# Families that transformers cannot give to torch's fused attention, and two that it can.
UNFUSED = {
    **{"bloom": {"n_head": 2, "n_layer": 1}, "gptj": {"n_embd": 16, "n_head": 2, "n_layer": 1}},
    **{"gpt_oss": {"num_local_experts": 2}, "granitemoe_swa": {"num_local_experts": 2}},
    "mimo_v2_flash": {},
    **{"granite_swa": {}, "mamba": {}, "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1}},
    **{"gemma2": {"head_dim": 8}, "vaultgemma": {"head_dim": 8}},
}


@pytest.mark.parametrize("family", [*UNFUSED, "llama", "qwen3"])
def test_families_load_for_a_gpu_with_the_attention_they_have(family: str, tmp_path: Path) -> None:
    sizes = FAMILY_SIZES | {"num_hidden_layers": 1} | UNFUSED.get(family, {})
    AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), device="cuda", is_skeleton=True)
    expected = "eager" if family in UNFUSED else "sdpa"
    assert model.config._attn_implementation == expected
    use_attention([model], "cuda", Layout.PADDED, Attention.AUTO)
    assert model.config._attn_implementation == expected


@pytest.mark.parametrize("cap", [2.0, 50.0])
@pytest.mark.parametrize("family", ["gemma2", "vaultgemma"])
def test_fused_attention_keeps_the_cap_of_scores(family: str, cap: float) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **FAMILY_SIZES, num_hidden_layers=2, head_dim=8, attn_logit_softcapping=cap
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            torch.nn.init.normal_(weight, std=4.0)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        model.config._attn_implementation = "sdpa"
        lost = model(input_ids=ids).logits
        use_attention([model], "cpu", Layout.PADDED, Attention.FUSED)
        fused = model(input_ids=ids).logits
        use_attention([model], "cpu", Layout.PADDED, Attention.PRODUCTS)
        capped = model(input_ids=ids).logits
    assert fused.equal(capped)
    assert (lost - capped).abs().max() > 1e-3


def test_unsupported_attention_arguments_are_refused() -> None:
    tensors = inputs(torch.float32)
    packing = packing_of(LENGTHS)
    more: dict[str, Any] = {"scaling": 1.0, "packing": packing, "position_bias": tensors[0]}
    for kernel in (cast(Any, each) for each in KERNELS.values()):
        with pytest.raises(ConfigError, match="Identity uses position_bias"):
            kernel(torch.nn.Identity(), *tensors, None, **more)


def test_learnt_positions_restart_in_each_sequence() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.manual_seed(0)
    model = cast(Any, GPT2LMHeadModel(config))
    sequences = [np.arange(9), np.arange(5, 12)]
    masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
    found = []
    for is_packed in (False, True):
        layout = Layout.PACKED if is_packed else Layout.PADDED
        use_attention([model], "cpu", layout, Attention.PRODUCTS)
        tokens = collate_tokens(sequences, masks, device="cpu", is_packed=is_packed)
        found.append(flat_hidden(model.base_model, tokens, dtype=torch.float32)[tokens.source_rows])
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-6)


def test_saved_policies_know_nothing_of_our_attention(tmp_path: Path) -> None:
    model = make_model()
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    model.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    again = load_policy(str(tmp_path), device="cpu")
    assert again.config._attn_implementation == "eager"
