"""Supervised fine-tuning on conversations: loss on the agent's tokens, any chat template."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from common.config.learning import LearnerSection
from common.config.run_config import RunConfig, SftSection
from common.errors import ConfigError
from learner.offline.agent_traj import read_conversations
from learner.offline.rows import Row, read_rows, token_batch
from learner.offline.scratch import make_policy, make_tokenizer, save_policy
from learner.policy.device import pick_device
from learner.policy.model import load_policy, token_logprobs
from learner.training.optimizer import PolicyOptimizer, make_optimizer

logger = logging.getLogger(__name__)

MAX_GRAD_NORM = 1.0
WARMUP_FRAC = 0.03


def run(cfg: RunConfig, demonstrations: Path) -> Path:
    """Train a policy on the demonstrations and return the folder it was written to.

    With `sft.from_scratch` tokenizer and weights are made first; else `model.path` is the start.
    Episodes worth less than `sft.min_reward` are left out, then all but the newest
    `sft.max_episodes`.

    Raises:
        ConfigError: there is nothing to learn from.
    """
    sft = cfg.sft
    device = pick_device(cfg.learner.device)
    if device.type == "cpu":
        torch.set_num_threads(cfg.learner.num_threads)
    if sft.from_scratch:
        if demonstrations.is_dir():
            raise ConfigError(
                f"sft.demonstrations={demonstrations}: a journal holds tokens, and a policy from "
                "nothing makes its own; give a file of conversations, or sft.from_scratch=false"
            )
        conversations = read_conversations(demonstrations)
        texts = (m.text for c in conversations for m in c.messages)
        tokenizer = make_tokenizer(texts, vocab_size=sft.vocab_size)
        model: PreTrainedModel = make_policy(sft, tokenizer, seed=cfg.run.seed)
        nn.Module.to(model, device)  # in place; its own wrapper hides the type
    else:
        tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
        model = load_policy(
            cfg.model.path,
            device=device,
            gradient_checkpointing=cfg.learner.gradient_checkpointing,
        )
    rows = read_rows(
        demonstrations,
        tokenizer=tokenizer,
        max_tokens=cfg.actor.max_model_len,
        key="sft.demonstrations",
    )
    rows = [row for row in rows if row.reward >= sft.min_reward]
    if not rows:
        raise ConfigError(f"sft.min_reward={sft.min_reward}: no episode of {demonstrations} has it")
    train(model, rows[-sft.max_episodes :], sft, cfg.learner, seed=cfg.run.seed)
    folder = Path(sft.output)
    save_policy(folder, model, tokenizer)
    return folder


def batches(
    rows: Sequence[Row], *, batch_tokens: int, generator: torch.Generator
) -> Iterator[list[Row]]:
    """Yield one epoch of batches of similar length, at most `batch_tokens` with padding."""
    order = torch.randperm(len(rows), generator=generator).tolist()
    order.sort(key=lambda i: len(rows[i].token_ids) // 8)  # stable: random within a length
    made: list[list[int]] = [[]]
    for i in order:
        longest = max(len(rows[j].token_ids) for j in (i, *made[-1]))
        if made[-1] and longest * (len(made[-1]) + 1) > batch_tokens:
            made.append([])
        made[-1].append(i)
    for b in torch.randperm(len(made), generator=generator).tolist():
        yield [rows[i] for i in made[b]]


def train(
    model: PreTrainedModel,
    rows: Sequence[Row],
    cfg: SftSection,
    learner: LearnerSection,
    *,
    seed: int,
) -> list[float]:
    """Train in place; return the mean loss of every epoch (nats per trained token)."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model, replace(learner, lr=cfg.lr, muon_lr=cfg.muon_lr))
    num_tokens = sum(len(row.token_ids) for row in rows)
    total = max(1, math.ceil(cfg.num_epochs * num_tokens / (0.95 * cfg.batch_tokens)))
    losses: list[float] = []
    step, started = 0, time.monotonic()
    model.train()
    for epoch in range(cfg.num_epochs):
        sum_loss = num_trained = 0.0
        for batch in batches(rows, batch_tokens=cfg.batch_tokens, generator=generator):
            optimizer.set_lr_scale(_schedule(step / total))
            loss, count = _step(model, optimizer, batch, learner)
            sum_loss, num_trained, step = sum_loss + loss * count, num_trained + count, step + 1
        losses.append(sum_loss / max(num_trained, 1))
        elapsed_s = time.monotonic() - started
        logger.info("epoch=%d loss=%.4f steps=%d s=%.0f", epoch + 1, losses[-1], step, elapsed_s)
    return losses


def _schedule(progress: float) -> float:
    """Return the share of the peak rate: short warm-up, then a cosine to a tenth."""
    if progress < WARMUP_FRAC:
        return progress / WARMUP_FRAC + 1e-3
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1.0)))


def _step(
    model: PreTrainedModel,
    optimizer: PolicyOptimizer,
    batch: list[Row],
    learner: LearnerSection,
) -> tuple[float, int]:
    """Take one optimizer step; return (mean loss, trained tokens)."""
    logprobs, _ = token_logprobs(
        model,
        token_batch(batch, model.device),
        chunk_tokens=learner.logprob_chunk_tokens,
        autocast=learner.autocast,
        temperature=1.0,
        with_entropy=False,
    )
    loss = -logprobs.mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), logprobs.numel()
