"""Laws of rotary embeddings: a sequence's scores do not depend on its neighbours' lengths."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from common.config.learner import Attention, Layout
from common.errors import ConfigError
from learner.batch.batching import collate_tokens
from learner.policy.kernels.attention import use_attention
from learner.policy.model import Scoring, load_policy, token_logprobs

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
ORIGINAL, LONGEST = 32, 128  # tokens that the network was trained with, and that it may have
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE |= {"original_max_position_embeddings": ORIGINAL}


def save(folder: Path, kind: str) -> str:
    torch.manual_seed(0)
    if kind == "longrope":
        config: Any = Phi3Config(
            **SMALL,
            max_position_embeddings=LONGEST,
            original_max_position_embeddings=ORIGINAL,
            rope_parameters=LONGROPE,  # pyright: ignore
        )
        model: Any = Phi3ForCausalLM(config)
    else:
        rope: Any = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        model = LlamaForCausalLM(
            LlamaConfig(**SMALL, max_position_embeddings=ORIGINAL, rope_parameters=rope)
        )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def load(path: str, max_tokens: int | None) -> PreTrainedModel:
    return load_policy(path, device="cpu", max_tokens=max_tokens)


def scored(model: PreTrainedModel, lengths: list[int], layout: Layout) -> Tensor:
    """Return the log-probabilities of the first sequence, which is always the same."""
    is_packed = use_attention([model], "cpu", layout, Attention.AUTO)
    sequences = [np.random.default_rng(n).integers(1, 50, n) for n in lengths]
    masks = [np.arange(n) > 0 for n in lengths]
    tokens = collate_tokens(sequences, masks, device="cpu", is_packed=is_packed)
    with torch.no_grad():
        logprobs = token_logprobs(model, tokens, Scoring(chunk_tokens=256, dtype=torch.float32))
    return logprobs[: lengths[0] - 1]


@pytest.mark.parametrize("layout", [Layout.PADDED, Layout.PACKED])
@pytest.mark.parametrize("max_tokens", [ORIGINAL, LONGEST, None])
def test_longrope_scores_do_not_depend_on_longer_neighbours(
    max_tokens: int | None, layout: Layout, tmp_path: Path
) -> None:
    model = load(save(tmp_path, "longrope"), max_tokens)
    alone = scored(model, [20], layout)
    beside = scored(model, [20, 100], layout)
    torch.testing.assert_close(beside, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("max_tokens", "factor"), [(ORIGINAL, 1), (LONGEST, 4), (None, 4)])
def test_longrope_is_long_beyond_original_context(
    max_tokens: int | None, factor: int, tmp_path: Path
) -> None:
    model: Any = load(save(tmp_path, "longrope"), max_tokens)
    scored(model, [20], Layout.PADDED)
    found = model.model.rotary_emb.inv_freq
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)  # The size of a head is 16.
    torch.testing.assert_close(found, plain / factor)


def test_longrope_of_short_contexts_equals_transformers(tmp_path: Path) -> None:
    path = save(tmp_path, "longrope")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = Phi3ForCausalLM.from_pretrained(path).eval()(ids).logits
        found = load(path, ORIGINAL)(input_ids=ids).logits
    torch.testing.assert_close(found, expected)


def test_dynamic_rope_is_refused_beyond_its_original_length(tmp_path: Path) -> None:
    path = save(tmp_path, "dynamic")
    said = r"rope_type=dynamic changes its frequencies beyond 32 tokens, .*max_model_len=33"
    with pytest.raises(ConfigError, match=said):
        load(path, ORIGINAL + 1)
    model = load(path, ORIGINAL)
    alone = scored(model, [20], Layout.PADDED)
    torch.testing.assert_close(scored(model, [20, 40], Layout.PADDED), alone, atol=1e-4, rtol=0)
