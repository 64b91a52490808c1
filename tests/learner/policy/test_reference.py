"""Laws of the reference: from the policy's own files it has the policy's own log-probabilities."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.conformance.networks import save_network
from common.config.learner import LearnerSection, LoraSection, Precision
from learner.batch.batching import collate_tokens
from learner.policy.forward import Networks, Passes
from learner.policy.loading import fill
from learner.policy.model import load_policy
from tests.learner.builders import make_model
from tests.learner.policy.test_loading import rank_of

IDS = [np.array(each) for each in ([5, 9, 17, 30, 41, 8, 7, 12, 6, 33], [3, 44, 2, 11, 29])]
FAMILIES = ["gpt2", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "qwen3_next"]


def scores_of_both(
    folder: Path,
    precision: Precision,
    stored: torch.dtype,
    *,
    mesh: Any = None,
    engine_dtype: str = "bfloat16",
    rank: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the scores of a policy and of its reference.

    Args:
        stored: dtype of frozen weights, bf16 on GPUs.
        rank: rank of adapters, whose reference is the base.
    """
    common: dict[str, Any] = {"device": "cpu"}
    common |= {"base_dtype": stored, "is_skeleton": mesh is not None}
    policy = load_policy(str(folder), **common, lora=LoraSection(rank=rank))
    reference = None if rank else load_policy(str(folder), **common, is_frozen=True)
    networks = Networks(policy=policy, reference=reference, is_base_reference=rank > 0)
    cfg = LearnerSection(device="cpu", precision=precision)
    passes = Passes(cfg, networks, temperature=1.0, engine_dtype=engine_dtype, mesh=mesh)
    if mesh is not None:
        for each in (policy, reference):
            if each is not None:
                fill(each, str(folder))
    masks = [np.arange(len(each)) > 0 for each in IDS]
    tokens = collate_tokens(IDS, masks, device="cpu", is_packed=passes.is_packed)
    with torch.no_grad():
        by_reference = passes.score_by_reference(tokens)
        assert by_reference is not None
        return passes.score(tokens).logprobs, by_reference


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("engine_dtype", ["float32", "bfloat16"])
def test_kl_to_the_first_version_is_zero(
    tmp_path: Path, stored: torch.dtype, is_tied: bool, is_sharded: bool, engine_dtype: str
) -> None:
    make_model(is_tied=is_tied).save_pretrained(tmp_path)
    with rank_of(1) if is_sharded else nullcontext() as mesh:
        scores = scores_of_both(
            tmp_path, Precision.BF16, stored, mesh=mesh, engine_dtype=engine_dtype
        )
    assert torch.equal(*scores)


def test_kl_to_the_first_version_is_zero_in_fp32(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    assert torch.equal(*scores_of_both(tmp_path, Precision.FP32, torch.float32))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_kl_to_the_base_of_new_adapters_is_zero(
    tmp_path: Path, stored: torch.dtype, is_sharded: bool
) -> None:
    make_model(is_tied=True).save_pretrained(tmp_path)
    with rank_of(1) if is_sharded else nullcontext() as mesh:
        scores = scores_of_both(tmp_path, Precision.BF16, stored, mesh=mesh, rank=4)
    assert torch.equal(*scores)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_kl_of_a_family_to_its_first_version_is_zero(tmp_path: Path, family: str) -> None:
    save_network(family, tmp_path)
    assert torch.equal(*scores_of_both(tmp_path, Precision.BF16, torch.bfloat16))
