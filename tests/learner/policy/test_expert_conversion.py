"""Laws of mixtures of experts: their files, their shards, and the names that engines receive."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from common.config.learner import Layout, LearnerSection, Precision
from learner.batch.batching import collate_tokens
from learner.policy.forward import Networks, Passes
from learner.policy.loading import fill
from learner.policy.model import load_policy, published_tensors
from learner.policy.sharding import shard
from learner.weights.source import LiveWeights
from tests.learner.builders import tensors_of
from tests.learner.experts import KINDS, VOCAB, save_experts
from tests.learner.policy.test_loading import rank_of

OTHERS = ("qwen2_moe", "olmoe", "granitemoe", "deepseek_v3")
HOW: dict[str, Any] = {"device": "cpu"}


def sequences_of(*lengths: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, VOCAB, length) for length in lengths]


@torch.no_grad()
def plain_scores(model: Any, sequence: np.ndarray) -> Tensor:
    ids = torch.from_numpy(sequence)
    logits = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
    return logits[:-1].gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_rank_of_three_reads_its_experts_only(tmp_path: Path, kind: str) -> None:
    save_experts(tmp_path, kind)
    expected = dict(load_policy(str(tmp_path), **HOW).named_parameters())
    with rank_of(3) as mesh:
        part = load_policy(str(tmp_path), **HOW, is_skeleton=True)
        shard(part, mesh, dtype=torch.float32)
        fill(part, str(tmp_path))
        for name, found in part.named_parameters():
            assert isinstance(found, DTensor)
            want = expected[name][: -(-len(expected[name]) // 3)]
            assert torch.equal(found.to_local(), want), name


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_engines_receive_the_tensors_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    save_experts(tmp_path, kind)
    model = load_policy(str(tmp_path), **HOW)
    published = tensors_of(LiveWeights(published_tensors(model), torch.float32))
    files = load_file(tmp_path / "model.safetensors")
    assert published.keys() == files.keys()
    assert all(torch.equal(published[name], files[name]) for name in files)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_moe", Layout.PADDED),
        ("qwen3_moe", Layout.PACKED),
        ("mixtral", Layout.PADDED),
        ("mixtral", Layout.PACKED),
        ("gpt_oss", Layout.PADDED),  # Its attention with sinks cannot be packed.
    ],
)
def test_scores_of_experts_equal_the_plain_forward(
    tmp_path: Path, kind: str, layout: Layout
) -> None:
    save_experts(tmp_path, kind)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    cfg = LearnerSection(device="cpu", precision=Precision.FP32, layout=layout)
    model = load_policy(str(tmp_path), **HOW)
    passes = Passes(cfg, Networks(policy=model), temperature=1.0, engine_dtype="float32")
    passes.check_start(may_pad=False)
    sequences = sequences_of(40, 23, 31)
    sequences[2][:16] = sequences[1][:16]
    expected = torch.cat([plain_scores(plain, each) for each in sequences])
    scores = passes.score_sequences([each.tolist() for each in sequences])
    assert (torch.tensor(list(chain(*scores))) - expected).abs().max() < 1e-4
    if layout is Layout.PACKED:  # The last two sequences have one copy of their prefix.
        masks = [np.arange(len(each)) >= 16 for each in sequences]
        shared = [0, 0, 16]
        tokens = collate_tokens(sequences, masks, device="cpu", is_packed=True, shared=shared)
        tails = torch.cat([plain_scores(plain, each)[15:] for each in sequences])
        with torch.no_grad():
            assert (passes.score(tokens).logprobs - tails).abs().max() < 1e-4
