"""Laws of the policy's log-probabilities and its tensors."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.kernels.head import TokenScores
from learner.policy.model import (
    Scoring,
    flat_hidden,
    hidden_logprobs,
    load_policy,
    parameter_count,
    published_tensors,
    token_logprobs,
    vocabulary_size,
)
from learner.weights.source import LiveWeights
from tests.learner.builders import VOCAB, make_model, recompute, tensors_of

RNG = np.random.default_rng(3)
SEQUENCES = [RNG.integers(0, VOCAB, size=n) for n in (9, 5, 12, 7)]
MASKS = [np.arange(len(sequence)) % 3 != 0 for sequence in SEQUENCES]


def batch_of(indices: list[int]) -> TokenBatch:
    sequences = [SEQUENCES[i] for i in indices]
    return collate_tokens(sequences, [MASKS[i] for i in indices], device="cpu")


def scored(model, tokens: TokenBatch, *, chunk_tokens: int = 4, temperature: float = 1.0):
    how = Scoring(chunk_tokens=chunk_tokens, dtype=torch.float32, temperature=temperature)
    rows = flat_hidden(model.base_model, tokens, dtype=torch.float32)[tokens.source_rows]
    return hidden_logprobs(model, rows, tokens.target_ids, how, with_entropy=True)[:2]


def naive_logprobs(model, temperature: float) -> torch.Tensor:
    """One sequence at a time, all logits at once."""
    parts = []
    for sequence, mask in zip(SEQUENCES, MASKS, strict=True):
        ids = torch.from_numpy(sequence)[None]
        logits = model(input_ids=ids).logits[0, :-1] / temperature
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        parts.append(logprobs[torch.from_numpy(mask[1:])])
    return torch.cat(parts)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_chunked_logprobs_and_gradients_equal_naive(
    chunk_tokens: int, is_checkpointed: bool
) -> None:
    model = make_model()
    factors = torch.linspace(-1, 1, sum(int(mask.sum()) for mask in MASKS))
    naive = naive_logprobs(model, 0.7)
    (naive * factors).sum().backward()
    expected = {name: cast(torch.Tensor, p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if is_checkpointed:
        recompute(model)

    got, _ = scored(model, batch_of([0, 1, 2, 3]), chunk_tokens=chunk_tokens, temperature=0.7)
    (got * factors).sum().backward()
    torch.testing.assert_close(got, naive, atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


def test_padding_and_neighbours_change_nothing() -> None:
    model = make_model()
    alone = torch.cat([scored(model, batch_of([i]))[0] for i in range(4)])
    together = scored(model, batch_of([0, 1, 2, 3]))[0]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_tokens_after_the_last_scored_one_change_no_gradient() -> None:
    gradients = []
    for last in (1, 2):
        model = make_model()
        sequence = np.array([3, 4, 5, last])
        mask = np.array([False, True, True, False])
        logprobs, _ = scored(model, collate_tokens([sequence], [mask], device="cpu"))
        logprobs.sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_entropy_is_that_of_the_predicting_distribution() -> None:
    model = make_model()
    torch.nn.init.zeros_(model.lm_head.weight)  # uniform over the vocabulary
    logprobs, entropy = scored(model, batch_of([0]))
    assert entropy is not None
    torch.testing.assert_close(entropy, torch.full_like(entropy, np.log(VOCAB)))
    torch.testing.assert_close(logprobs, -entropy)


def test_autocast_stays_close_to_full_precision() -> None:
    model = make_model()
    tokens = batch_of([0, 1, 2, 3])
    with torch.no_grad():
        full, _ = scored(model, tokens)
        mixed = token_logprobs(model, tokens, Scoring(chunk_tokens=8, dtype=torch.bfloat16))
    assert mixed.dtype == torch.float32
    assert 0 < (mixed - full).abs().mean() < 0.02


def test_no_scored_token_gives_no_logprob() -> None:
    tokens = collate_tokens([np.array([1, 2])], [np.zeros(2, dtype=bool)], device="cpu")
    logprobs, entropy = scored(make_model(), tokens)
    assert logprobs.shape == (0,)
    assert entropy is not None
    assert entropy.shape == (0,)


@pytest.mark.parametrize("is_tied", [False, True])
def test_exported_tensors_are_the_whole_model_once(is_tied: bool) -> None:
    model = make_model(is_tied=is_tied)
    exported = tensors_of(LiveWeights(published_tensors(model), torch.bfloat16))
    assert ("lm_head.weight" in exported) is not is_tied
    assert sum(tensor.numel() for tensor in exported.values()) == parameter_count(model)
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    norm = exported["model.layers.1.input_layernorm.weight"]
    assert torch.equal(norm, cast(Any, model.model.layers[1]).input_layernorm.weight.bfloat16())


def test_policy_is_loaded_in_fp32_without_dropout(tmp_path: Path) -> None:
    saved = make_model()
    saved.config.attention_dropout = 0.5
    saved.bfloat16().save_pretrained(tmp_path)
    loaded = load_policy(str(tmp_path), device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert not any(module.training for module in loaded.modules())
    assert loaded.model.layers[0].self_attn.attention_dropout == 0.0
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight.float())


def test_missing_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_policy(str(tmp_path / "nowhere"), device="cpu")


def test_token_ids_are_below_the_vocabulary_size() -> None:
    model = make_model()
    model(input_ids=torch.tensor([[vocabulary_size(model) - 1]]))
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[vocabulary_size(model)]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_of_logits_have_the_gradient_of_their_formula(
    dtype: torch.dtype, temperature: float
) -> None:
    torch.manual_seed(0)
    drawn = (3 * torch.randn(7, 400_000)).to(dtype)  # Two rows are one block.
    targets = torch.randint(0, 400_000, (7,))
    support_ids = torch.stack([targets, (targets + 5) % 400_000], 1)
    upstream = [torch.randn(7), torch.randn(7), torch.randn(7, 2)]

    def formula(logits: torch.Tensor) -> list[torch.Tensor]:
        scores = (logits.double() / temperature).log_softmax(-1)
        chosen = scores.gather(1, targets[:, None])[:, 0]
        entropy = -(scores.exp() * scores).sum(-1)
        return [chosen.float(), entropy.float(), scores.gather(1, support_ids).float()]

    expected_logits = drawn.clone().requires_grad_()
    expected = formula(expected_logits)
    torch.autograd.backward(expected, upstream)
    leaf = drawn.clone().requires_grad_()
    made: Any = TokenScores.apply(leaf * 1, targets, temperature, True, support_ids)
    for ours, theirs in zip(made, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=5e-5)
    torch.autograd.backward(made, upstream, retain_graph=True)
    assert leaf.grad is not None
    assert expected_logits.grad is not None
    difference = (leaf.grad - expected_logits.grad).abs().max()
    assert difference <= (1e-5 if dtype is torch.float32 else 2e-2)
    with pytest.raises(RuntimeError, match="replaced their logits"):
        torch.autograd.backward(made, upstream)
