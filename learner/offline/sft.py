"""Supervised fine-tuning on conversations: loss on the agent's tokens, any chat template."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from common.config import RunConfig, SftSection
from common.config_learning import LearnerSection
from common.errors import ConfigError
from learner.device import pick_device
from learner.model import load_policy
from learner.offline.agent_traj import Conversation, read_conversations
from learner.offline.scratch import make_policy, make_tokenizer, save_policy
from learner.optimizer import PolicyOptimizer, make_optimizer

logger = logging.getLogger(__name__)

MAX_GRAD_NORM = 1.0
WARMUP_FRAC = 0.03
IGNORED = -100  # label of a token without loss


def run(cfg: RunConfig, demonstrations: Path) -> Path:
    """Train a policy on the demonstrations and return the folder it was written to.

    With `sft.from_scratch` tokenizer and weights are made first; else `model.path` is the start.
    """
    conversations = read_conversations(demonstrations)
    if not conversations:
        raise ConfigError(f"{demonstrations} holds no conversation")
    sft = cfg.sft
    device = pick_device(cfg.learner.device)
    if device.type == "cpu":
        torch.set_num_threads(cfg.learner.num_threads)
    if sft.from_scratch:
        texts = (m.text for c in conversations for m in c.messages)
        tokenizer = make_tokenizer(texts, vocab_size=sft.vocab_size)
        model: PreTrainedModel = make_policy(sft, tokenizer, seed=cfg.run.seed)
        nn.Module.to(model, device)  # in place; its own wrapper hides the type
    else:
        tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
        model = load_policy(cfg.model.path, device=device, gradient_checkpointing=False)
    rows = encode_all(tokenizer, conversations, max_tokens=cfg.actor.max_model_len)
    train(model, rows, sft, cfg.learner, seed=cfg.run.seed)
    folder = Path(sft.output)
    save_policy(folder, model, tokenizer)
    return folder


def encode(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Return (token ids, labels) of one conversation, both [seq].

    The template renders growing prefixes; what it adds for an agent's message is that message with
    its end-of-turn token, and is the only part with labels.

    Raises:
        ConfigError: the template changes earlier turns when later ones are added.
    """
    ids: list[int] = []
    labels: list[int] = []
    done = ""
    chat: list[dict[str, str]] = []
    for message in conversation.messages:
        chat.append({"role": "assistant" if message.is_agent else "user", "content": message.text})
        rendered = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=not message.is_agent
        )
        if not rendered.startswith(done):
            raise ConfigError("the chat template rewrites earlier turns")
        part = tokenizer.encode(rendered[len(done) :], add_special_tokens=False)
        done = rendered
        ids += part
        labels += part if message.is_trained else [IGNORED] * len(part)
    return ids, labels


def encode_all(
    tokenizer: Any, conversations: list[Conversation], *, max_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Return the encoded conversations, cut on the right at `max_tokens`.

    One without a trained token is left out: the mean loss of a batch of such is 0/0.

    Raises:
        ConfigError: no conversation has a trained token.
    """
    rows = [encode(tokenizer, conversation) for conversation in conversations]
    num_cut = sum(len(ids) > max_tokens for ids, _ in rows)
    if num_cut:
        logger.warning("cut conversations=%d max_tokens=%d", num_cut, max_tokens)
    cut = [(ids[:max_tokens], labels[:max_tokens]) for ids, labels in rows]
    trained = [row for row in cut if any(label != IGNORED for label in row[1][1:])]
    if len(trained) < len(cut):
        logger.warning("left out conversations=%d without loss", len(cut) - len(trained))
    if not trained:
        raise ConfigError(f"no conversation has an agent's token within {max_tokens} tokens")
    return trained


def batches(
    rows: list[tuple[list[int], list[int]]], *, batch_tokens: int, generator: torch.Generator
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Yield one epoch of batches of similar length, at most `batch_tokens` with padding."""
    order = torch.randperm(len(rows), generator=generator).tolist()
    order.sort(key=lambda i: len(rows[i][0]) // 8)  # stable: random within a length
    made: list[list[int]] = [[]]
    for i in order:
        longest = max([len(rows[i][0]), *(len(rows[j][0]) for j in made[-1])])
        if made[-1] and longest * (len(made[-1]) + 1) > batch_tokens:
            made.append([])
        made[-1].append(i)
    for b in torch.randperm(len(made), generator=generator).tolist():
        yield [rows[i] for i in made[b]]


def train(
    model: Any,
    rows: list[tuple[list[int], list[int]]],
    cfg: SftSection,
    learner: LearnerSection,
    *,
    seed: int,
) -> list[float]:
    """Train in place; return the mean loss of every epoch (nats per trained token)."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model, replace(learner, lr=cfg.lr, muon_lr=cfg.muon_lr))
    num_tokens = sum(len(ids) for ids, _ in rows)
    total = max(1, math.ceil(cfg.num_epochs * num_tokens / (0.95 * cfg.batch_tokens)))
    losses: list[float] = []
    step, started = 0, time.monotonic()
    model.train()
    for epoch in range(cfg.num_epochs):
        sum_loss = num_trained = 0.0
        for batch in batches(rows, batch_tokens=cfg.batch_tokens, generator=generator):
            optimizer.set_lr_scale(_schedule(step / total))
            loss, count = _step(model, optimizer, batch)
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
    model: Any, optimizer: PolicyOptimizer, batch: list[tuple[list[int], list[int]]]
) -> tuple[float, int]:
    """Take one optimizer step; return (mean loss, trained tokens)."""
    ids, labels, attention = _pad(batch, model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=attention).logits
    loss = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), int((labels[:, 1:] != IGNORED).sum())


def _pad(
    batch: list[tuple[list[int], list[int]]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (token ids, labels, attention mask), each [batch, seq], padded on the right."""
    length = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([row + [0] * (length - len(row)) for row, _ in batch])
    labels = torch.tensor([row + [IGNORED] * (length - len(row)) for _, row in batch])
    attention = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row, _ in batch])
    return ids.to(device), labels.to(device), attention.to(device)
