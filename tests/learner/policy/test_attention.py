"""Laws of attention over packed sequences."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from common.config.compute import Attention, Layout
from common.errors import ConfigError
from learner.batch.batching import collate_tokens
from learner.batch.packing import Packing, pack, packed_rows
from learner.policy.kernels import attention as under_test
from learner.policy.kernels.attention import use_attention
from learner.policy.model import flat_hidden, load_policy
from tests.learner.builders import VOCAB, make_model

# Below, at and beyond a chunk of queries; 768 in all, so that the row is not filled up.
LENGTHS = (1, 200, 2, 128, 129, 308)
KERNELS = {"fused": under_test._fused, "products": under_test._products}
# Torch's fused kernel keeps sums of exponentials in fp32 for its backward pass.
TOLERANCE = {"fused": 1e-5, "products": 1e-10}
HEADS, KV_HEADS, SIZE = 4, 2, 8


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


def block_masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention with one mask over all pairs, [1, seq, head, size]."""
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (owner[:, None] == owner[None]).tril()
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    scores = (query @ keys.transpose(2, 3) * 0.3).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2)


def run(kernel: Any, tensors: list[Tensor]) -> Tensor:
    module = torch.nn.Identity()
    return kernel(module, *tensors, None, scaling=0.3, packing=packing_of(LENGTHS))[0]


@pytest.mark.parametrize("name", KERNELS)
def test_packed_kernels_equal_one_block_mask(name: str) -> None:
    ours, theirs = inputs(), inputs()
    weights = torch.linspace(-1, 1, sum(LENGTHS) * HEADS * SIZE, dtype=torch.float64)
    found, expected = run(KERNELS[name], ours), block_masked(*theirs)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    (found.flatten() * weights).sum().backward()
    (expected.flatten() * weights).sum().backward()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=TOLERANCE[name], rtol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_round_no_more_than_the_models_attention(name: str) -> None:
    model = make_model()
    sequences = [np.arange(n) * 7 % VOCAB for n in (40, 3, 25)]
    masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
    hidden: dict[str, Tensor] = {}
    for kind, autocast, is_packed in (
        ("exact", False, False),
        ("own", True, False),
        (name, True, True),
    ):
        layout = Layout.PACKED if is_packed else Layout.PADDED
        use_attention([model], "cpu", layout, Attention(name if is_packed else "products"))
        tokens = collate_tokens(sequences, masks, device="cpu", is_packed=is_packed)
        with torch.no_grad():
            rows = flat_hidden(model.base_model, tokens, autocast=autocast)
            hidden[kind] = rows[tokens.source_rows].float()
    own, ours = ((hidden[kind] - hidden["exact"]).norm() for kind in ("own", name))
    assert 0 < ours < 1.3 * own


def test_each_query_runs_once_with_at_most_128_in_a_block() -> None:
    asked = [block.queries for block in packing_of(LENGTHS).blocks()]
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
        return flat_hidden(model.base_model, tokens, autocast=False)[20:]

    assert states(first).equal(states(other))


def test_packing_is_refused_for_sliding_attention() -> None:
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = Gemma3ForCausalLM(config)
    assert not use_attention([model], "cpu", Layout.AUTO, Attention.AUTO)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match=r"packed: gemma3_text has layers that .* slid"):
        use_attention([model], "cpu", Layout.PACKED, Attention.AUTO)


@pytest.mark.parametrize("window", [8, None])
@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3", "starcoder2"])
def test_sequences_are_packed_only_without_window(family: str, window: int | None) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(family, vocab_size=VOCAB, sliding_window=window, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config)
    is_packed = use_attention([model], "cpu", Layout.AUTO, Attention.PRODUCTS)
    assert is_packed == (window is None)
    sequences = [np.arange(9), np.arange(5, 12)]
    masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
    tokens = collate_tokens(sequences, masks, device="cpu", is_packed=is_packed)
    assert flat_hidden(model.base_model, tokens, autocast=False).isfinite().all()
    if window is not None:
        with pytest.raises(
            ConfigError, match=f"packed: {family} has layers that .* sliding_attention"
        ):
            use_attention([model], "cpu", Layout.PACKED, Attention.AUTO)


def test_unsupported_attention_arguments_are_refused() -> None:
    tensors = inputs(torch.float32)
    packing = packing_of(LENGTHS)
    more: dict[str, Any] = {"scaling": 1.0, "packing": packing, "s_aux": 1}
    for kernel in (cast(Any, each) for each in KERNELS.values()):
        with pytest.raises(ConfigError, match="Identity uses s_aux"):
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
        found.append(flat_hidden(model.base_model, tokens, autocast=False)[tokens.source_rows])
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-6)


def test_saved_policies_know_nothing_of_our_attention(tmp_path: Path) -> None:
    model = make_model()
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    model.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    again = load_policy(str(tmp_path), device="cpu", gradient_checkpointing=False)
    assert again.config._attn_implementation == "eager"
