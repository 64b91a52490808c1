"""Supervised fine-tuning on conversations: loss on the agent's tokens, any chat template."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from common.config.learner import LearnerSection
from common.errors import ConfigError, EnvError, TrialFailed
from common.store.run_dir import RunDir
from learner.policy.forward import Passes
from learner.training.step import Loss
from tools.exchange.agent_traj import read_conversations
from tools.launch.hub import command_part, serve_hub
from tools.offline.checks import check_base
from tools.offline.config import SftConfig, SftSection
from tools.offline.demonstrate import demonstrate
from tools.offline.rows import Row, newest, read_rows, token_batch
from tools.offline.scratch import make_policy, make_tokenizer, save_policy
from tools.offline.training import (
    WEIGHT,
    Log,
    ignore,
    load_start,
    logged_steps,
    make_passes,
    prepare_device,
    train_epochs,
)

MAX_GRAD_NORM = 1.0
WARMUP_FRAC = 0.03


def run(cfg: SftConfig, demonstrations: Path, *, log: Log = ignore) -> Path:
    """Train a policy on the demonstrations and return its folder.

    With `sft.from_scratch` a new tokenizer and new weights are made; else `model.path` is the
    start. Episodes with a reward below `sft.min_reward` are left out. Of the others the newest
    `sft.max_episodes` are used.

    Raises:
        ConfigError: no episode can be used.
    """
    sft = cfg.sft
    if sft.from_scratch:
        check_base(cfg)
        if demonstrations.is_dir():
            raise ConfigError(
                f"sft.demonstrations={demonstrations}: a journal has token ids, but"
                " sft.from_scratch=true makes a new tokenizer. Use a file of conversations, or set"
                " sft.from_scratch=false."
            )
        conversations = read_conversations(demonstrations)
        texts = (m.text for c in conversations for m in c.messages)
        tokenizer = make_tokenizer(texts, vocab_size=sft.vocab_size)
        model: PreTrainedModel = make_policy(sft, tokenizer, seed=cfg.run.seed)
        # `Module.to` moves the model in place. The wrapper of transformers hides its type.
        nn.Module.to(model, prepare_device(cfg.learner))
    else:
        model, tokenizer = load_start(
            cfg.model.path, cfg.learner, max_tokens=cfg.actor.max_model_len
        )
    rows = read_rows(
        demonstrations,
        tokenizer=tokenizer,
        max_tokens=cfg.actor.max_model_len,
        key="sft.demonstrations",
        keep_thinking=cfg.actor.keep_thinking,
    )
    rows = [row for row in rows if row.is_worth(sft.min_reward)]
    if not rows:
        raise ConfigError(
            f"sft.min_reward={sft.min_reward}: no episode of {demonstrations} has this reward."
            " Lower sft.min_reward."
        )
    if sft.from_scratch or not sft.demonstrations:
        model.config.prompt_style = cfg.envhub.style
    train(model, newest(rows, sft.max_episodes), sft, cfg.learner, seed=cfg.run.seed, log=log)
    return save_policy(Path(sft.output), model, tokenizer)


def batches(
    rows: Sequence[Row], *, batch_tokens: int, generator: torch.Generator
) -> Iterator[list[Row]]:
    """Yield one epoch of batches of similar length, at most `batch_tokens` with padding."""
    order = torch.randperm(len(rows), generator=generator).tolist()
    # The sort is stable, so rows of similar length stay in random order.
    order.sort(key=lambda i: len(rows[i].token_ids) // 8)
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
    log: Log = ignore,
) -> list[float]:
    """Train in place; return the mean loss of every epoch (nats per trained token)."""
    learner = replace(cfg.rated(learner), max_grad_norm=MAX_GRAD_NORM)
    passes = make_passes(model, learner)
    generator = torch.Generator().manual_seed(seed)
    # The schedule needs the number of steps, and an epoch's batches depend on its order.
    epochs = [
        list(batches(rows, batch_tokens=cfg.batch_tokens, generator=generator))
        for _ in range(cfg.num_epochs)
    ]
    num_steps = sum(map(len, epochs))
    planned = iter(epochs)

    def one_epoch() -> Iterator[list[list[Row]]]:
        for batch in next(planned):
            yield [batch]

    metrics = train_epochs(
        model,
        passes,
        learner,
        num_epochs=cfg.num_epochs,
        batches=one_epoch,
        loss_of=lambda batch, _: nll(passes, batch, prompt_coef=cfg.prompt_coef),
        metrics=["loss"],
        lr_scale=lambda step: _schedule((step + 1) / num_steps),
        log=log,
    )
    return [epoch["loss"] for epoch in metrics]


def nll(passes: Passes, batch: Sequence[Row], *, prompt_coef: float) -> Loss:
    """Return the weighted mean loss of a batch, and the sums over the agent's tokens alone.

    The agent's tokens have weight 1, all other tokens `prompt_coef`. Example: losses 2 and 4 of the
    agent's tokens, 8 of one prompt token, with 0.5: (2 + 4 + 0.5 * 8) / 2.5 = 4.
    """
    rows = [replace(row, mask=np.ones_like(row.mask)) for row in batch] if prompt_coef else batch
    tokens = token_batch(rows, passes.device, is_packed=passes.is_packed)
    logprobs = passes.score(tokens).logprobs
    scored = np.concatenate(
        [row.mask[1:][each.mask[1:]] for row, each in zip(batch, rows, strict=True)]
    )
    is_agent = torch.from_numpy(scored).to(logprobs)
    weights = is_agent + prompt_coef * (1 - is_agent)
    total = -(is_agent * logprobs.detach()).sum()
    loss = -(weights * logprobs).sum() / weights.sum().clamp_min(1e-9)
    return loss, {"loss": total, WEIGHT: is_agent.sum()}


def _schedule(progress: float) -> float:
    """Return the fraction of the peak rate: short warm-up, then a cosine decay to a tenth.

    Args:
        progress: (0, 1] of all steps, the current one included.
    """
    if progress < WARMUP_FRAC:
        return progress / WARMUP_FRAC + 1e-3
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1.0)))


def collect_and_imitate(cfg: SftConfig, run_dir: RunDir) -> int:
    """Train on demonstrations, collected first if none are given; return the exit code."""
    output = cfg.sft.output or str(run_dir.root / "policy")
    cfg = replace(cfg, sft=replace(cfg.sft, output=output))
    cfg, part = command_part(cfg, run_dir, "sft")
    path = Path(cfg.sft.demonstrations)
    if not cfg.sft.demonstrations:
        path = part.demonstrations
        with serve_hub(cfg, part) as (url, token):
            try:
                demonstrate(cfg, url, token, path)
            except EnvError as error:
                log = "" if cfg.envhub.url else f"; the log is {part.logs / 'envhub.log'}"
                raise TrialFailed(f"a demonstration failed: {error}{log}") from error
    with logged_steps(cfg, part, "sft") as log:
        print(f"policy: {run(cfg, path, log=log)}")
    return 0
