"""The whole algorithm in one process, with the project's own functions: a minute on a CPU.

Run it with `PYTHONPATH=.`. The system splits it into actors, a scheduler, a hub and a learner. A
comment names the file of the system that does the same.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoTokenizer

from actor.formats.renderer import Renderer
from actor.rollout.episode import first_text
from common.config.algorithm import AlgorithmSection
from envhub.catalogue.registry import Registry
from envhub.env import Env, Style
from learner.algorithms.grpo import group_advantages
from learner.algorithms.interface import LossInputs, log_ratio
from learner.batch.batching import collate_tokens
from learner.objective.loss import Denominator, importance_weights, policy_loss
from learner.policy.model import Scoring, load_policy, token_logprobs

MODEL = "configs/policies/tiny-expert"
SUBSET = "ActionObjDoor"
NUM_STEPS = 3
NUM_GROUPS = 4
GROUP_SIZE = 4
HORIZON = 4
MAX_TURN_TOKENS = 12
CFG = AlgorithmSection()  # GRPO, PPO's clip around the sampler, truncated importance weights
SPEC = Registry(["babyai"]).spec("babyai")


@dataclass
class Episode:
    """An environment and the tokens of its conversation. No token is ever encoded again."""

    env: Env
    token_ids: list[int]
    mask: list[bool]  # [seq] True where the policy sampled the token.
    logprobs: list[float] = field(default_factory=list[float])  # [tokens] nats of the sampler.
    reward: float = 0.0
    is_over: bool = False


def open_episode(renderer: Renderer, index: int) -> Episode:
    """Return an episode of a training item, before its first turn."""
    env = SPEC.make(Style.COMPACT)  # envhub/hosting/worker_main.py
    observation = env.reset(f"{SUBSET}-train-{index}", seed=0)  # envhub/hosting/sessions.py
    text = first_text(SPEC.instruction[Style.COMPACT], observation)  # actor/rollout/episode.py
    prompt = renderer.first_prompt(text)  # actor/formats/renderer.py
    return Episode(env, prompt, [False] * len(prompt))


@torch.no_grad()
def sample_turn(policy, episodes: list[Episode], end_ids: list[int]) -> list[list[int]]:
    """Sample the next turn of each episode. Keep its tokens with their logprobs."""
    width = max(len(episode.token_ids) for episode in episodes)
    pads = [width - len(episode.token_ids) for episode in episodes]
    rows = torch.tensor([[0] * n + e.token_ids for n, e in zip(pads, episodes, strict=True)])
    is_real = torch.arange(width) >= torch.tensor(pads)[:, None]  # [episode, seq]
    sampled = policy.generate(  # actor/engine/engine.py: vLLM
        rows,
        attention_mask=is_real.long(),
        eos_token_id=end_ids,
        pad_token_id=0,
        do_sample=True,
        top_k=0,
        max_new_tokens=MAX_TURN_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.stack(sampled.logits, 1).float().log_softmax(-1)  # [episode, new, vocab]
    turns = []
    for row, episode in enumerate(episodes):  # actor/rollout/context.py
        new = sampled.sequences[row, width:].tolist()
        size = next((i + 1 for i, token in enumerate(new) if token in end_ids), len(new))
        episode.token_ids += new[:size]
        episode.mask += [True] * size
        episode.logprobs += [logprobs[row, i, new[i]].item() for i in range(size)]
        turns.append(new[:size])
    return turns


def play(policy, renderer: Renderer) -> list[list[Episode]]:
    """Play groups of episodes side by side, each to its end or to the horizon."""
    # scheduler/core.py opens groups, actor/rollout/pool.py plays their episodes.
    groups = [[open_episode(renderer, i) for _ in range(GROUP_SIZE)] for i in range(NUM_GROUPS)]
    for _ in range(HORIZON):  # scheduler/curriculum/curriculum.py
        live = [episode for group in groups for episode in group if not episode.is_over]
        turns = sample_turn(policy, live, renderer.end_of_turn_ids) if live else []
        for episode, turn in zip(live, turns, strict=True):
            result = episode.env.step(renderer.action_text(turn))  # actor/rollout/env_client.py
            episode.reward = result.reward
            episode.is_over = result.done
            is_stopped = turn[-1] in renderer.end_of_turn_ids
            shown = renderer.after_action(result.observation, is_stopped=is_stopped)
            episode.token_ids += shown
            episode.mask += [False] * len(shown)
    return groups  # actor/delivery.py sends them, learner/ingest/buffer.py collects the groups


def train_on(policy, optimizer, groups: list[list[Episode]]) -> float:
    """Make one optimizer step; return the mean ratio of the policy to the sampler."""
    episodes = [episode for group in groups for episode in group]
    rewards = [torch.tensor([episode.reward for episode in group]) for group in groups]
    parts = [  # learner/algorithms/grpo.py
        group_advantages(of_group, baseline=CFG.baseline, normalize_std=CFG.normalize_std)
        for of_group in rewards
    ]
    advantages = torch.cat(parts)  # [episode]
    owner = torch.tensor([i for i, e in enumerate(episodes) for _ in e.logprobs])  # [tokens]
    sequences = [np.array(episode.token_ids) for episode in episodes]
    masks = [np.array(episode.mask) for episode in episodes]
    batch = collate_tokens(sequences, masks, device="cpu")  # learner/batch/batching.py
    scoring = Scoring(chunk_tokens=4096, dtype=torch.float32)
    new = token_logprobs(policy, batch, scoring)  # [tokens]; learner/policy/forward.py
    old = torch.tensor([value for episode in episodes for value in episode.logprobs])  # [tokens]
    log_rho = log_ratio(new.detach(), old)
    # learner/objective/loss.py, learner/algorithms/tis.py, learner/algorithms/ppo.py
    weights = importance_weights(log_rho, owner, len(episodes), CFG, is_ratio_included=True)
    inputs = LossInputs(
        new_logprobs=new,
        anchor_logprobs=old,
        sampler_logprobs=old,
        is_weights=weights,
        sequence_ids=owner,
        num_sequences=len(episodes),
        advantages=advantages[owner],
    )
    whole = Denominator(num_tokens=len(new), num_sequences=len(episodes))
    optimizer.zero_grad()
    policy_loss(inputs, whole, CFG)[0].backward()  # learner/training/step.py
    optimizer.step()  # learner/training/trainer.py; learner/weights/publisher.py then sends it
    return log_rho.exp().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    policy = load_policy(MODEL, device="cpu")
    renderer = Renderer(AutoTokenizer.from_pretrained(MODEL))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)  # learner/training/optimizer.py
    ready = play(policy, renderer)  # Each batch is played one step before its training: lag 1.
    for version in range(1, NUM_STEPS + 1):  # learner/main.py
        groups = ready
        ready = play(policy, renderer)
        reward = np.mean([episode.reward for group in groups for episode in group])
        ratio = train_on(policy, optimizer, groups)
        print(f"version {version}: reward {reward:.3f}, ratio to the sampler {ratio:.3f}")
