"""Laws of training steps with a teacher: layouts, adapters, critics, ranks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.config.algorithm import Advantage, AlgorithmSection, TeacherForm, TeacherSection
from common.config.learner import ControllerSection, Layout, LearnerSection, Precision
from common.segments import as_rows
from learner.batch.batching import Sample, episodes_of, rows_of
from learner.policy.forward import Networks
from learner.policy.model import make_critic
from learner.training.ranks import pack_samples, unpack_samples
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import (
    VOCAB,
    make_model,
    make_model_with_adapters,
    make_samples,
    make_trajectory,
)

K = 4
SAMPLED = TeacherSection(path="t")
TOPK = TeacherSection(path="t", form=TeacherForm.TOPK, k=K)


def taught_by(model: Any, samples: list[Sample], cfg: TeacherSection) -> list[Sample]:
    """Return the samples with the scores of another model, by its plain forward pass."""
    taught: list[Sample] = []
    for sample in samples:
        t = sample.trajectory
        with torch.no_grad():
            ids = torch.from_numpy(t.token_ids.astype(np.int64))[None]
            logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
        rows = logprobs[np.flatnonzero(t.loss_mask) - 1]
        if cfg.num_top:
            top, best = rows.topk(K)
            columns = {"teacher_ids": best.int().numpy(), "teacher_top": top.numpy()}
        else:
            chosen = torch.from_numpy(t.token_ids[t.loss_mask].astype(np.int64))
            columns = {"teacher_logprobs": rows.gather(1, chosen[:, None])[:, 0].numpy()}
        taught.append(replace(sample, **columns))
    return taught


def trainer_of(model: Any, algorithm: AlgorithmSection, **learner: Any) -> Trainer:
    section = LearnerSection(
        device="cpu",
        precision=Precision.FP32,
        warmup_steps=0,
        max_grad_norm=1e9,
        controller=ControllerSection(scale_lr=False, skip_step=False, tighten_gate=False),
        **learner,
    )
    critic = None
    if algorithm.advantage is Advantage.PPO:
        critic = make_critic(section.critic, model, policy_path="")
    settings = TrainerSettings(
        learner=section, algorithm=algorithm, num_steps=100, engine_dtype="float32"
    )
    return Trainer(settings, Networks(policy=model, critic=critic))


def shared_samples() -> list[Sample]:
    """Return two groups of three members with a common prompt of ten tokens."""
    rng = np.random.default_rng(5)
    samples: list[Sample] = []
    for group in range(2):
        prompt = rng.integers(0, VOCAB, size=10).tolist()
        for number in range(3):
            answer = rng.integers(0, VOCAB, size=4 + number).tolist()
            mask = [0] * 10 + [1] * len(answer)
            t = make_trajectory(
                prompt + answer,
                mask,
                logprobs=[-3.9] * len(answer),
                group_id=f"g{group}",
                member=number,
            )
            samples.append(Sample(trajectory=t, advantage=float(number - 1)))
    return samples


@pytest.mark.parametrize("cfg", [SAMPLED, TOPK])
def test_gradient_does_not_depend_on_the_layout(cfg: TeacherSection) -> None:
    samples = taught_by(make_model(seed=9), shared_samples(), cfg)
    found: list[tuple[float, float, float]] = []
    for layout, shares in ((Layout.PADDED, False), (Layout.PACKED, False), (Layout.PACKED, True)):
        trainer = trainer_of(
            make_model(),
            AlgorithmSection(teacher=cfg),
            layout=layout,
            shared_prefix=shares,
            max_tokens_per_microbatch=64,
            logprob_chunk_tokens=5,
        )
        metrics = trainer.train_on(samples, version=0).metrics
        found.append((metrics["train/grad_norm"], metrics["teacher/kl"], metrics["loss/policy"]))
    for each in found[1:]:
        assert each == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[0][0] > 0


def test_topk_gradient_equals_that_of_plain_logits() -> None:
    samples = taught_by(make_model(seed=9), shared_samples()[:2], TOPK)
    model = make_model()
    losses: list[torch.Tensor] = []
    for sample in samples:
        t = sample.trajectory
        ids = torch.from_numpy(t.token_ids.astype(np.int64))[None]
        rows = model(input_ids=ids).logits[0].log_softmax(-1)[np.flatnonzero(t.loss_mask) - 1]
        q = torch.from_numpy(np.asarray(sample.teacher_top))
        own = rows.gather(1, torch.from_numpy(np.asarray(sample.teacher_ids, dtype=np.int64)))
        rest = 1 - own.exp().sum(-1)
        rest_q = 1 - q.exp().sum(-1)
        losses.append((own.exp() * (own - q)).sum(-1) + rest * (rest / rest_q).log())
    kl = torch.cat(losses).mean()
    kl.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    right = torch.cat([each.flatten() for each in gradients]).norm()
    trainer = trainer_of(make_model(), AlgorithmSection(teacher=TOPK))
    metrics = trainer.train_on(samples, version=0).metrics
    assert metrics["teacher/kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(right.item(), rel=1e-3)


@pytest.mark.parametrize("advantage", [Advantage.GRPO, Advantage.PPO, Advantage.REINFORCE_PP])
def test_policy_approaches_its_teacher(advantage: Advantage) -> None:
    algorithm = AlgorithmSection(teacher=TOPK, advantage=advantage)
    trainer = trainer_of(make_model(), algorithm, lr=1e-2)
    samples = taught_by(make_model(seed=9), shared_samples(), TOPK)
    kls = [trainer.train_on(samples, version=step).metrics["teacher/kl"] for step in range(6)]
    assert kls[-1] < 0.7 * kls[0]


@pytest.mark.parametrize("cfg", [SAMPLED, TOPK])
def test_adapters_alone_are_taught(cfg: TeacherSection) -> None:
    model = make_model_with_adapters()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trainer_of(model, AlgorithmSection(teacher=cfg), lr=1e-2)
    samples = taught_by(make_model(seed=9), make_samples(), cfg)
    assert trainer.train_on(samples, version=0).metrics["train/grad_norm"] > 0
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(".lora_" in name for name in changed)


def test_equal_teacher_gives_no_gradient() -> None:
    samples = taught_by(make_model(), shared_samples(), TOPK)
    trainer = trainer_of(make_model(), AlgorithmSection(teacher=TOPK))
    metrics = trainer.train_on(samples, version=0).metrics
    assert metrics["teacher/kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("cfg", [SAMPLED, TOPK])
def test_scores_reach_the_other_ranks_unchanged(cfg: TeacherSection) -> None:
    samples = taught_by(make_model(seed=9), make_samples(), cfg)
    for own, other in zip(samples, unpack_samples(pack_samples(samples)), strict=True):
        for name in ("teacher_logprobs", "teacher_ids", "teacher_top"):
            np.testing.assert_array_equal(getattr(own, name), getattr(other, name))


@pytest.mark.parametrize("cfg", [SAMPLED, TOPK])
def test_segments_of_an_episode_keep_their_own_scores(cfg: TeacherSection) -> None:
    (sample, *_) = taught_by(make_model(seed=9), shared_samples(), cfg)
    starts = np.array([0, 12], dtype=np.int32)
    whole = replace(sample, trajectory=replace(sample.trajectory, segment_starts=starts))
    rows = rows_of([whole])
    sizes = [int(part.loss_mask.sum()) for part in as_rows(whole.trajectory)]
    name = "teacher_top" if cfg is TOPK else "teacher_logprobs"
    assert [len(getattr(row, name)) for row in rows] == sizes
    (joined,) = episodes_of(rows)
    np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
