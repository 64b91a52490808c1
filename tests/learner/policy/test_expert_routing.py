"""Laws of routing replay: routers use recorded experts, with the gates of their own logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.config.learner import Activations, Layout, LearnerSection, Precision
from common.errors import ConfigError
from learner.batch.batching import Sample, collate_tokens
from learner.policy.forward import Networks, Passes
from learner.policy.model import load_policy
from tests.learner.builders import make_microbatches, make_model, make_trajectory
from tests.learner.experts import VOCAB, save_experts

ALL = ("qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "olmoe", "granitemoe", "deepseek_v3")


def passes_of(
    path: Path, *, layout: Layout = Layout.PADDED, checkpointing: bool = False
) -> tuple[Any, Passes]:
    model = load_policy(str(path), device="cpu")
    cfg = LearnerSection(
        device="cpu",
        precision=Precision.FP32,
        layout=layout,
        activations=Activations.RECOMPUTE if checkpointing else Activations.KEEP,
    )
    networks = Networks(policy=model)
    passes = Passes(cfg, networks, temperature=1.0, engine_dtype="float32", replays_routing=True)
    passes.check_start(may_pad=False)
    return model, passes


def sequences_of(*lengths: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, VOCAB, length) for length in lengths]


def block_of(passes: Passes, sequences: list[np.ndarray], recorded: Any, **how: Any) -> Any:
    masks = [np.arange(len(each)) > 0 for each in sequences]
    return collate_tokens(
        sequences, masks, device="cpu", is_packed=passes.is_packed, recorded=recorded, **how
    )


def watch_choices(model: Any) -> dict[int, Tensor]:
    """Record what the experts of each layer receive: [position, chosen] ids."""
    seen: dict[int, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            number = int(name.split(".")[2])
            module.register_forward_pre_hook(
                lambda _, args, number=number: seen.update({number: args[1].clone()})
            )
    return seen


def draw_choices(num: int, shape: Any, *, seed: int = 1) -> np.ndarray:
    """Return [num, layer, chosen] distinct experts for each token."""
    draw = np.random.default_rng(seed)
    order = draw.random((num, shape.num_layers, shape.num_experts)).argsort(-1)
    return order[..., : shape.num_chosen].astype(np.uint8)


@pytest.mark.parametrize("kind", ALL)
def test_recorded_experts_replace_the_routers_choice(tmp_path: Path, kind: str) -> None:
    save_experts(tmp_path, kind)
    model, passes = passes_of(tmp_path)
    shape = passes.routing
    assert shape is not None
    assert (shape.num_layers, shape.num_chosen) == (2, 2)
    seen = watch_choices(model)
    (sequence,) = sequences_of(24)
    with torch.no_grad():
        own = passes.score(block_of(passes, [sequence], None)).logprobs
        chosen = {layer: ids.numpy() for layer, ids in seen.items()}
        ids = np.zeros((24, 2, 2), dtype=np.uint8)
        for layer, each in chosen.items():
            ids[:, layer] = each
        mask = np.ones(24, dtype=bool)
        same = passes.score(block_of(passes, [sequence], [(ids, mask)])).logprobs
        assert (same - own).abs().max() < 1e-6
        other = draw_choices(24, shape)
        mask[20:] = False
        scored = passes.score(block_of(passes, [sequence], [(other, mask)])).logprobs
    assert (scored - own).abs().max() > 1e-3
    for layer, found in seen.items():
        assert np.array_equal(found.numpy()[:20], other[:20, layer])
    first = min(chosen)  # The states before the first layer of experts are unchanged.
    assert np.array_equal(seen[first].numpy()[20:], chosen[first][20:])


def test_gates_are_softmax_of_own_logits_at_recorded_experts(tmp_path: Path) -> None:
    """Qwen3-MoE by hand: softmax over all experts, taken at the record, scaled to sum 1."""
    save_experts(tmp_path, "qwen3_moe")
    model, passes = passes_of(tmp_path)
    assert passes.routing is not None
    (sequence,) = sequences_of(10)
    ids = draw_choices(10, passes.routing)
    inputs: list[Tensor] = []
    gates: list[Tensor] = []
    block = model.model.layers[0].mlp
    block.gate.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    block.experts.register_forward_pre_hook(lambda _, args: gates.append(args[2]))
    tokens = block_of(passes, [sequence], [(ids, np.ones(10, dtype=bool))])
    passes.score(tokens).logprobs.sum().backward()
    probs = F.softmax(inputs[0].detach() @ block.gate.weight.detach().T, -1)
    want = probs.gather(1, torch.from_numpy(ids[:, 0]).long())
    want = want / want.sum(-1, keepdim=True)
    torch.testing.assert_close(gates[0].detach(), want)
    assert block.gate.weight.grad.abs().max() > 0


def test_checkpointed_gradients_use_the_recorded_experts(tmp_path: Path) -> None:
    save_experts(tmp_path, "qwen3_moe")
    found = []
    for checkpointing in (False, True):
        model, passes = passes_of(tmp_path, checkpointing=checkpointing)
        assert passes.routing is not None
        sequences = sequences_of(20, 12)
        recorded = [(draw_choices(20, passes.routing), np.ones(20, dtype=bool)), None]
        passes.score(block_of(passes, sequences, recorded)).logprobs.sum().backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-5, rtol=1e-4, msg=name)


def test_packed_prefix_scores_as_padded_with_records(tmp_path: Path) -> None:
    save_experts(tmp_path, "qwen3_moe")
    scores = []
    for layout in (Layout.PADDED, Layout.PACKED):
        _, passes = passes_of(tmp_path, layout=layout)
        assert passes.routing is not None
        sequences = sequences_of(30, 22, 26)
        sequences[2][:16] = sequences[1][:16]
        ids = [draw_choices(len(each), passes.routing, seed=len(each)) for each in sequences]
        ids[2][:16] = ids[1][:16]
        masks = [np.arange(len(each)) > 2 for each in sequences]
        recorded = list(zip(ids, masks, strict=True))
        scored = [np.arange(len(each)) >= 12 for each in sequences]
        shared = [0, 0, 16] if layout is Layout.PACKED else ()
        tokens = collate_tokens(
            sequences,
            scored,
            device="cpu",
            is_packed=passes.is_packed,
            shared=shared,
            recorded=recorded,
        )
        with torch.no_grad():
            scores.append(passes.score(tokens).logprobs)
    assert (scores[0] - scores[1]).abs().max() < 1e-4


@pytest.mark.parametrize("unlike", ["ids", "mask", "absent"])
def test_members_with_unlike_records_use_their_own(tmp_path: Path, unlike: str) -> None:
    """The last member differs from token 10 of a prefix of 16: it shares the tokens before it."""
    save_experts(tmp_path, "qwen3_moe")
    sequences = sequences_of(20, 24, 22)
    scored = {}
    num_positions = {}
    for layout in (Layout.PADDED, Layout.PACKED):
        model, passes = passes_of(tmp_path, layout=layout)
        assert passes.routing is not None
        samples = []
        for member, sequence in enumerate(sequences):
            sequence[:16] = sequences[0][:16]
            ids = draw_choices(len(sequence), passes.routing)  # Equal in the prefix.
            mask = np.ones(len(sequence), dtype=bool)
            if member == 2 and unlike == "ids":
                ids[10:16] = draw_choices(6, passes.routing, seed=2)
            elif member == 2:
                mask[10 if unlike == "mask" else 0 :] = False
            trajectory = make_trajectory(
                list(sequence),
                [int(at >= 16) for at in range(len(sequence))],
                member=member,
                expert_ids=ids[:0] if not mask.any() else ids,
                expert_mask=mask[:0] if not mask.any() else mask,
            )
            samples.append(Sample(trajectory=trajectory, advantage=1.0))
        (micro,) = make_microbatches(
            samples,
            range(3),
            max_tokens=1000,
            device="cpu",
            is_packed=passes.is_packed,
            shares_prefix=True,
        )
        order = np.argsort(np.repeat(micro.sample_indices, micro.sample_sizes), kind="stable")
        logprobs = passes.score(micro.tokens).logprobs[torch.from_numpy(order)]
        logprobs.sum().backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
        scored[layout] = logprobs.detach(), gradient
        is_real = micro.tokens.is_real
        assert is_real is not None
        num_positions[layout] = int(is_real.sum())
    for packed, padded in zip(scored[Layout.PACKED], scored[Layout.PADDED], strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-4, rtol=1e-3)
    shared = 16 + (0 if unlike == "absent" else 10)
    assert num_positions[Layout.PACKED] == num_positions[Layout.PADDED] - shared


def test_replay_without_experts_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"routing_replay=true: Qwen3Model has no experts"):
        passes_of(tmp_path)


def test_router_without_topk_is_refused_by_name(tmp_path: Path) -> None:
    save_experts(tmp_path, "qwen3_moe")
    model = load_policy(str(tmp_path), device="cpu")

    def by_sorting(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = states.reshape(-1, 64) @ model.model.layers[0].mlp.gate.weight.T
        order = logits.argsort(-1, descending=True)[:, :2]
        return logits, logits.softmax(-1).gather(1, order), order

    model.model.layers[0].mlp.gate.forward = by_sorting
    cfg = LearnerSection(device="cpu", precision=Precision.FP32, layout=Layout.PADDED)
    passes = Passes(
        cfg, Networks(policy=model), temperature=1.0, engine_dtype="float32", replays_routing=True
    )
    with pytest.raises(ConfigError, match=r"routers of Qwen3MoeModel do not choose"):
        passes.check_start(may_pad=False)
