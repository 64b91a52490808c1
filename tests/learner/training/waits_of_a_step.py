"""Prints, as JSON, how often the host waits for the device in a training step of each algorithm."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from common.config.algorithm import Advantage, AlgorithmSection, Correction, PolicyLoss, Proximal
from common.config.learner import (
    FULL,
    Attention,
    CriticSection,
    Layout,
    LearnerSection,
    LoraSection,
    Precision,
)
from common.weights.buckets import views
from learner.batch.packing import placed
from learner.policy.forward import Networks
from learner.policy.kernels import attention, flash
from learner.policy.model import Critic
from learner.training.step import TrainerSettings
from learner.training.trainer import INFORMATION_EVERY_STEPS, Trainer
from learner.weights.source import LiveWeights
from tests.learner.builders import make_model, make_model_with_adapters, make_samples
from tests.learner.fake_device import NAME, FakeDevice, OnDevice, register

ALGORITHMS = {
    "grpo": AlgorithmSection(),
    "turn": AlgorithmSection(policy_loss=PolicyLoss.TURN),
    "gspo": AlgorithmSection(policy_loss=PolicyLoss.GSPO, correction=Correction.SEQUENCE_TIS),
    "recomputed": AlgorithmSection(proximal=Proximal.RECOMPUTED),
    "second moment": AlgorithmSection(correction=Correction.SECOND_MOMENT),
    "reference": AlgorithmSection(kl_coef=0.1, entropy_coef=0.01, drift_coef=0.1),
    "critic": AlgorithmSection(advantage=Advantage.PPO),
}
BUDGETS = (10_000, 14)  # Tokens of a microbatch: one microbatch, and many.


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An algorithm, and the form of the policy that it trains."""

    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    layout: Layout = Layout.PACKED
    has_adapters: bool = False  # The policy without them is the reference.
    window: int | None = None  # Keys that a query attends to; None: all.


CASES = {
    **{name: Case(algorithm=each) for name, each in ALGORITHMS.items()},
    "padded": Case(layout=Layout.PADDED),
    "adapters": Case(algorithm=AlgorithmSection(kl_coef=0.1), has_adapters=True),
    "window": Case(window=4),
}


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: OnDevice,
    cu_seq_k: OnDevice,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return attention of packed sequences and its logarithms [head, query] of sums.

    It reads no bounds of lengths, as the kernel of CUDA.
    """
    parts: list[Tensor] = []
    sums: list[Tensor] = []
    rows = zip(pairwise(cu_seq_q.inner.tolist()), pairwise(cu_seq_k.inner.tolist()), strict=True)
    for (first, end), (k_first, k_end) in rows:
        if first == end:
            continue
        own = (query[first:end], key[k_first:k_end], value[k_first:k_end])
        q, k, v = (each.transpose(0, 1) for each in own)
        hidden = torch.full((end - first, k_end - k_first), -torch.inf, device=NAME)
        own_key = k_end - k_first - (end - first)  # Key of the first query.
        pattern = hidden.triu(own_key + 1)
        if window_size[0] >= 0:
            pattern = pattern + hidden.tril(own_key - window_size[0] - 1)
        scores = q @ k.transpose(1, 2) * scale + pattern
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(parts), torch.cat(sums, 1)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: OnDevice,
    cu_seq_k: OnDevice,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """Compute attention of sequences that share no rows."""
    bounds = cu_seq_q, cu_seq_k
    return attended(query, key, value, *bounds, scale=scale, window_size=window_size)[0]


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, call: flash.FlashCall
) -> tuple[Tensor, ...]:
    """Compute attention of sequences that share rows. It has no gradient."""
    starts, key_starts = (cast(OnDevice, each) for each in call.bounds[:2])
    return attended(
        query, key, value, starts, key_starts, scale=call.scaling, window_size=call.span
    )


def on_device(model: Any) -> Any:
    return model.to(NAME)


def policy_of(case: Case) -> Any:
    if case.has_adapters:
        return make_model_with_adapters()
    model = make_model(num_layers=1)
    if case.window is None:
        return model
    config = model.config
    config.layer_types = ["sliding_attention"]
    config.sliding_window = case.window
    return type(model)(config).train()


def waits_of(case: Case, max_tokens: int, version: int) -> dict[str, Any]:
    """Return the counts of the second step of a trainer on the fake device."""
    watch = FakeDevice()
    algorithm = case.algorithm
    cfg = LearnerSection(
        precision=Precision.FP32,
        layout=case.layout,
        attention=Attention.FUSED,
        max_tokens_per_microbatch=max_tokens,
        critic=CriticSection(whiten=False),
        lora=LoraSection(rank=4, alpha=8.0) if case.has_adapters else FULL,
    )
    with watch:
        model = on_device(policy_of(case))
        has_critic = algorithm.advantage is Advantage.PPO
        critic = Critic(model.config.hidden_size, None).to(NAME) if has_critic else None
        has_reference = algorithm.kl_coef > 0 and not case.has_adapters
        reference: Any = on_device(make_model(seed=1, num_layers=1)) if has_reference else None
        for each in filter(None, (model, reference)):
            attention._measured[each] = attention._Packable(attention.Separation.KERNELS)
        settings = TrainerSettings(learner=cfg, algorithm=algorithm, num_steps=10)
        networks = Networks(
            policy=model, critic=critic, reference=reference, is_base_reference=case.has_adapters
        )
        trainer = Trainer(settings, networks)
        samples = make_samples(num_groups=3)
        trainer.train_on(samples, version=1, must_train=True)
        micros = list(trainer._gradients._microbatches(samples, range(len(samples))))
        watch.forget()
        result = trainer.train_on(samples, version=version, must_train=True)
    assert result.metrics["train/num_updates"] == 1
    return {
        "waits": dict(watch.waits),
        "num_waits": sum(watch.waits.values()),
        "blocking_uploads": watch.uploads["blocking"],
        "num_microbatches": len(micros),
    }


def check_placed() -> None:
    """Check that one copy of many arrays keeps the numbers of each."""
    arrays = {"ids": np.arange(5), "none": np.zeros(0), "marks": np.array([True, False, True])}
    with FakeDevice():
        for name, tensor in placed(arrays, NAME).items():
            np.testing.assert_array_equal(tensor.cpu().numpy(), arrays[name])


def waits_of_a_part() -> dict[str, Any]:
    """Return the counts of one bucket of a version that is sent from the host's memory."""
    watch = FakeDevice()
    with watch:
        weights = [(f"w{number}", torch.full((5, 3), float(number))) for number in range(40)]
        source = LiveWeights([(name, each.to(NAME)) for name, each in weights], torch.bfloat16)
        part = torch.zeros(source.total_bytes, dtype=torch.uint8)
        watch.forget()
        source.fill(0, part)
        waits = dict(watch.waits)
        for name, tensor in views(part, source.specs):
            assert tensor.tolist() == dict(weights)[name].tolist()
    return waits


def main(names: Sequence[str]) -> None:
    """Print the counts of the named cases; no names: of all."""
    register()
    check_placed()
    flash._device_problem = lambda device: ""  # pyright: ignore
    flash.DTYPES = (torch.float32,)  # pyright: ignore
    flash.varlen_attn = varlen  # pyright: ignore
    flash.flash_forward = flash_forward
    found: dict[str, Any] = {
        name: [waits_of(case, each, version=2) for each in BUDGETS]
        for name, case in CASES.items()
        if name in names or not names
    }
    found["with information"] = [
        waits_of(CASES["grpo"], each, version=INFORMATION_EVERY_STEPS) for each in BUDGETS
    ]
    found["a part of a version"] = waits_of_a_part()
    print(json.dumps(found))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(sys.argv[1:])
