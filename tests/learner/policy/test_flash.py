"""Laws of flash attention over packed sequences, whatever the family of the model."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from common.config.learner import Attention, Layout
from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.determinism import make_deterministic, zero_dropout_rates
from learner.policy.kernels import attention, flash
from learner.policy.kernels.attention import packing_problem, use_attention
from learner.policy.model import Scoring, token_logprobs
from tests.learner.builders import VOCAB, make_model, make_model_with_adapters
from tests.learner.policy.test_selfcheck import FAMILIES, HEAD, PADDED, SCALED, SMALL
from tests.learner.policy.varlen_kernel import VarlenKernel, use_kernel

BF16 = Scoring(chunk_tokens=64, dtype=torch.bfloat16)
WINDOW = 8
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
# Families with windows or caps, in a form that can be packed.
CHANGED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gemma2": HEAD
    | ALTERNATING
    | {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "gemma3_text": HEAD | ALTERNATING,
    "olmo3": ALTERNATING,
    "exaone4": HEAD | ALTERNATING,
    "cohere2": ALTERNATING,
}
NO_AUTOCAST = {"dbrx"}  # Experts of dbrx add bf16 to fp32 in transformers.
# Families with layers that do not use the kernel for whole rows.
NO_KERNEL = {"falcon", "gpt_oss", "gptj", "mpt", "bloom", "mamba", "mamba2", "bamba", "jamba"}
NO_KERNEL |= {"zamba2", "falcon_h1", "gemma2", *PADDED, *NO_AUTOCAST}
PACKED = {name: more for name, more in FAMILIES.items() if name not in NO_KERNEL}
PACKED |= CHANGED

BOTH = {-1, WINDOW - 1}  # The kernel counts the keys before a query's own.
WINDOWS = {"mistral": {WINDOW - 1}} | dict.fromkeys(CHANGED.keys() - {"mistral"}, BOTH)


def model_of(family: str) -> Any:
    """Build a family's network of two layers with fp32 weights, as the learner keeps them."""
    name, more = SCALED.get(family, (family, {}))
    config = AutoConfig.for_model(name, **(SMALL | PACKED[family] | more))
    zero_dropout_rates(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    make_deterministic(model)
    return model


def rows(*lengths: int) -> TokenBatch:
    ids = [np.arange(length) * 7 % VOCAB for length in lengths]
    masks = [np.arange(length) > 0 for length in lengths]
    return collate_tokens(ids, masks, device="cpu", is_packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(PACKED))
def test_kernel_gets_bf16_once_per_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    assert packing_problem(model) == ""
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    blocks = [rows(9, 30, 4), rows(17, 2)]
    expected = [token_logprobs(model, each, BF16).detach() for each in blocks]
    kernel = VarlenKernel()
    use_kernel(monkeypatch, kernel)
    use_attention([model], "cpu", Layout.PACKED, Attention.FUSED)
    for block, other in zip(blocks, expected, strict=True):
        logprobs = token_logprobs(model, block, BF16)
        logprobs.sum().backward()
        assert (logprobs - other).abs().mean() < 0.02 * other.abs().mean()
    assert len(kernel.dtypes) == len(blocks) * model.config.num_hidden_layers
    assert set(kernel.windows) == WINDOWS.get(family, {-1})
    assert set.union(*kernel.dtypes) == {torch.bfloat16}
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    assert {each.dtype for each in grads} == {torch.float32}


def test_adapters_of_bf16_weights_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model_with_adapters()
    for weight in model.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.bfloat16()
    kernel = VarlenKernel()
    use_kernel(monkeypatch, kernel)
    use_attention([model], "cpu", Layout.PACKED, Attention.FUSED)
    token_logprobs(model, rows(9, 30, 4), BF16).sum().backward()
    assert kernel.dtypes == [{torch.bfloat16}] * 2


class OldKernel(VarlenKernel):
    """The kernel of torch 2.11, without grouped heads."""

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> Tensor:
        rest = (cu_seq_q, cu_seq_k, max_q, max_k)
        return super().__call__(query, key, value, *rest, scale=scale, window_size=window_size)


def test_kernel_without_grouped_heads_gets_repeated_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    found = []
    for kernel, heads in ((VarlenKernel(), (4, 2)), (OldKernel(), (4, 4))):
        use_kernel(monkeypatch, kernel)
        use_attention([model], "cpu", Layout.PACKED, Attention.FUSED)
        model.zero_grad()
        logprobs = token_logprobs(model, rows(9, 30, 4), BF16)
        logprobs.sum().backward()
        assert kernel.heads == [heads] * 2
        weights = dict(model.named_parameters())
        found.append((logprobs.detach(), weights["model.layers.0.self_attn.k_proj.weight"].grad))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-3, rtol=0)
    assert (found[1][1] - found[0][1]).norm() < 0.02 * found[0][1].norm()


@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (12, 12), (12, 8), (20, 16)])
def test_odd_head_sizes_are_padded(
    size: int, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    packing = rows(9, 30, 4).packing
    sizes = (size, size, value_size)
    # The row has 43 tokens and is filled to 64.
    tensors = [torch.randn(1, 2, 64, each, generator=generator) for each in sizes]
    fused: Any = attention._fused
    plain = fused(nn.Identity(), *tensors, None, scaling=0.3, packing=packing)[0]
    use_kernel(monkeypatch, VarlenKernel())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fused(nn.Identity(), *tensors, None, scaling=0.3, packing=packing)[0]
    assert found.shape == (1, 64, 2, value_size)
    torch.testing.assert_close(found.float(), plain, atol=0.05, rtol=0.05)


def _flash_by_cpu(
    query: Tensor, key: Tensor, value: Tensor, call: flash.FlashCall
) -> tuple[Tensor, ...]:
    """Return what `flash_forward` returns, by the formula."""
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for asked, keys, values, hidden in _by_sequence(call, query, key, value):
        scores = asked @ keys.transpose(1, 2) * call.scaling + hidden
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1), torch.zeros(2), torch.zeros(0)


def _by_sequence(
    call: flash.FlashCall, query: Tensor, key: Tensor, value: Tensor
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the rows [head, seq, size] of each sequence, and 0 or -inf [query, key]."""
    heads = query.shape[1]
    packing = call.packing
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    of_keys = list(packing.key_lengths)
    parts = zip(
        query.split(list(packing.lengths)), key.split(of_keys), value.split(of_keys), strict=True
    )
    sequences: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for part in parts:
        num, num_keys = len(part[0]), len(part[1])
        seen = torch.ones(num, num_keys, dtype=torch.bool).tril(num_keys - num)
        if call.window is not None:
            seen = seen.triu(num_keys - num - call.window + 1)
        hidden = torch.zeros(num, num_keys).masked_fill(~seen, -torch.inf)
        asked, keys, values = (each.transpose(0, 1) for each in part)
        sequences.append((asked, keys, values, hidden))
    return sequences


def _flash_backward_by_cpu(
    gradient: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    sums: Tensor,
    state: Any,
    call: flash.FlashCall,
) -> tuple[Tensor, ...]:
    """Return what `flash_backward` returns, by the formula."""
    lengths = list(call.packing.lengths)
    columns: list[list[Tensor]] = [[], [], []]
    of_rows = zip(gradient.split(lengths), out.split(lengths), sums.split(lengths, 1), strict=True)
    for part, (of_out, own, logs) in zip(_by_sequence(call, *rows), of_rows, strict=True):
        asked, keys, values, hidden = part
        of_out, own = of_out.transpose(0, 1), own.transpose(0, 1)
        shares = (asked @ keys.transpose(1, 2) * call.scaling + hidden - logs[..., None]).exp()
        inner = (of_out * own).sum(-1, keepdim=True)
        of_scores = shares * (of_out @ values.transpose(1, 2) - inner) * call.scaling
        columns[0].append(of_scores @ keys)
        columns[1].append(of_scores.transpose(1, 2) @ asked)
        columns[2].append(shares.transpose(1, 2) @ of_out)
    whole = [torch.cat([each.transpose(0, 1) for each in column]) for column in columns]
    return tuple(
        each.unflatten(1, (of_input.shape[1], -1)).sum(2)
        for each, of_input in zip(whole, rows, strict=True)
    )


@pytest.fixture
def by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the formula compute what flash attention computes on CUDA."""
    monkeypatch.setattr(flash, "flash_forward", _flash_by_cpu)
    monkeypatch.setattr(flash, "flash_backward", _flash_backward_by_cpu)
    monkeypatch.setattr(flash, "flash_problem", lambda query, value: "")


def tree() -> TokenBatch:
    """Return a row of branches: of the first path, of a branch, and at the root."""
    ids = [np.arange(9), np.r_[0:7, 50:60], np.r_[0:7, 50:55, 70:74], np.r_[0:2, 80:90]]
    masks = [np.arange(len(each)) > 0 for each in ids]
    return collate_tokens(ids, masks, device="cpu", is_packed=True, shared=[0, 7, 12, 2])


@pytest.mark.parametrize("window", [None, 2, 4, 30])
@pytest.mark.parametrize("most", [2**18, 20, 1])
def test_flash_kernel_gets_the_ancestors_of_each_branch(
    window: int | None, most: int, by_formula: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "GATHERED_KEYS", most)
    packing = tree().packing
    found: list[list[Tensor]] = []
    for name in ("_fused", "_products"):
        generator = torch.Generator().manual_seed(0)
        tensors = [
            torch.randn(1, heads, 64, 8, generator=generator).requires_grad_()
            for heads in (4, 2, 2)
        ]
        kernel: Any = getattr(attention, name)
        how = {"scaling": 0.3, "packing": packing, "sliding_window": window}
        out = kernel(nn.Identity(), *tensors, None, **how)[0]
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        found.append([out.detach(), *(each.grad for each in tensors if each.grad is not None)])
    assert len(found[0]) == 4
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [rows(9, 30, 4), tree()])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sinks_need_only_the_sums_of_a_flash_kernel(
    kv_heads: int, block: TokenBatch, by_formula: None
) -> None:
    generator = torch.Generator().manual_seed(0)
    packing = block.packing
    found: list[list[Tensor]] = []
    for name in ("_fused", "_products"):
        generator.manual_seed(0)
        tensors = [
            torch.randn(1, heads, 64, 8, generator=generator).requires_grad_()
            for heads in (4, kv_heads, kv_heads)
        ]
        sinks = torch.tensor([-1.0, 0.5, 2.0, 0.0], requires_grad=True)
        kernel: Any = getattr(attention, name)
        out = kernel(nn.Identity(), *tensors, None, scaling=0.3, packing=packing, s_aux=sinks)[0]
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        leaves = [*tensors, sinks]
        found.append([out.detach(), *(each.grad for each in leaves if each.grad is not None)])
    assert len(found[0]) == 5
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_fallback_is_logged_once_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    kernel = VarlenKernel()
    use_kernel(monkeypatch, kernel)
    monkeypatch.setattr(attention, "_warned", set())
    use_attention([model], "cpu", Layout.PACKED, Attention.FUSED)
    for _ in range(2):
        token_logprobs(model, rows(9, 30), Scoring(chunk_tokens=64, dtype=torch.float32))
    assert not kernel.dtypes
    (line,) = [each for each in caplog.messages if "one by one" in each]
    assert "Qwen3Attention" in line
    assert "attention computes in torch.float32, not in 16 bits (learner.precision=bf16)" in line


def test_reason_for_no_flash_attention_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    small = torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16)
    large = torch.zeros(1, 2, 3, 288, dtype=torch.bfloat16)
    assert flash.flash_problem(small, small) == flash.NO_CUDA
    monkeypatch.setattr(flash, "_device_problem", lambda device: "")
    assert flash.flash_problem(small, small) == ""
    assert flash.flash_problem(small, large) == "a head has 288 numbers, more than 256"
    assert "float32" in flash.flash_problem(small.float(), small.float())


def test_cpu_uses_no_flash_attention_silently(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    use_attention([model], "cpu", Layout.PACKED, Attention.FUSED)
    token_logprobs(model, rows(9, 30), BF16)
    assert not caplog.messages


class CudnnWatch(TorchDispatchMode):
    """Records whether cuDNN might compute each attention."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if "scaled_dot_product" in str(func):
            self.allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return func(*args, **(kwargs or {}))


def test_cudnn_never_plans_attention_for_a_length() -> None:
    model = make_model()
    use_attention([model], "cpu", Layout.PACKED, Attention.FUSED)
    with CudnnWatch() as watch:
        token_logprobs(model, rows(9, 30), BF16)
    assert watch.allowed == [False] * 6  # Two sequences and the filling, in two layers.
