"""The whole algorithm in one process, with the project's own functions: a minute on a CPU.

Run from the repository: `python docs/examples/one_page.py`. The real system splits these lines
into roles: actors play, a scheduler opens groups, a learner trains, a hub holds environments.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import AutoTokenizer

from actor.rollout.episode import first_text
from actor.rollout.render import Renderer
from common.config.learning import AlgorithmSection
from envhub.catalogue.registry import Registry
from envhub.env import Env, EnvSpec, Style
from learner.batch.advantage import group_advantages
from learner.batch.batching import collate_tokens
from learner.objective.correction import importance_weights, log_ratio
from learner.objective.loss import Denominator, LossInputs, policy_loss
from learner.policy.model import Scoring, load_policy, token_logprobs

MODEL = "configs/policies/tiny-expert"
SUBSET, GROUPS, MEMBERS, HORIZON, TURN_TOKENS, STEPS = "GoToLocal", 6, 8, 6, 12, 6
ALGORITHM = AlgorithmSection()  # GRPO, PPO-clip to the sampler, truncated importance weights


@dataclass
class Episode:
    """An environment and the tokens of its conversation: token in, token out."""

    env: Env
    token_ids: list[int]
    mask: list[bool]  # [tokens] True where the policy sampled the token
    logprobs: list[float] = field(default_factory=list)  # [sampled tokens] nats, of the sampler
    reward: float = 0.0
    is_over: bool = False


def open_group(spec: EnvSpec, renderer: Renderer, index: int) -> list[Episode]:
    """Return the members of one group: the same item, opened several times."""
    members = []
    for _ in range(MEMBERS):
        env = spec.make(Style.COMPACT)
        observation = env.reset(f"{SUBSET}-train-{index}", seed=0)
        prompt = renderer.first_prompt(first_text(spec.instruction[Style.COMPACT], observation))
        members.append(Episode(env, prompt, [False] * len(prompt)))
    return members


@torch.no_grad()
def sample_turn(policy, episodes: list[Episode], end_ids: list[int]) -> list[list[int]]:
    """Sample the next turn of each episode, and record its tokens with their logprobs."""
    longest = max(len(each.token_ids) for each in episodes)
    pads = [longest - len(each.token_ids) for each in episodes]
    rows = torch.tensor([[0] * n + e.token_ids for n, e in zip(pads, episodes, strict=True)])
    seen = torch.tensor([[0] * n + [1] * (longest - n) for n in pads])  # [episode, seq]
    output = policy.generate(
        input_ids=rows, attention_mask=seen, do_sample=True, top_k=0, max_new_tokens=TURN_TOKENS,
        eos_token_id=end_ids, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    logprobs = torch.stack(output.logits, 1).float().log_softmax(-1)  # [episode, new, vocab]
    turns = []
    for row, episode in enumerate(episodes):
        new = output.sequences[row, longest:].tolist()
        end = next((i + 1 for i, token in enumerate(new) if token in end_ids), len(new))
        episode.token_ids += new[:end]
        episode.mask += [True] * end
        episode.logprobs += [logprobs[row, i, new[i]].item() for i in range(end)]
        turns.append(new[:end])
    return turns


def play(policy, spec: EnvSpec, renderer: Renderer, first_item: int) -> list[list[Episode]]:
    """Play groups of episodes to their end or to the horizon, all of them side by side."""
    policy.eval()
    groups = [open_group(spec, renderer, first_item + number) for number in range(GROUPS)]
    for _ in range(HORIZON):
        live = [each for group in groups for each in group if not each.is_over]
        if not live:
            break
        turns = sample_turn(policy, live, renderer.end_of_turn_ids)
        for episode, turn in zip(live, turns, strict=True):
            result = episode.env.step(renderer.action_text(turn))
            episode.reward, episode.is_over = result.reward, result.done
            is_stopped = turn[-1] in renderer.end_of_turn_ids
            shown = renderer.after_action(result.observation, is_stopped=is_stopped)
            episode.token_ids += shown
            episode.mask += [False] * len(shown)
    return groups


def train_on(policy, optimizer, groups: list[list[Episode]]) -> dict[str, float]:
    """Make one optimizer step on groups that an older version may have sampled."""
    policy.train()
    rewards = [torch.tensor([each.reward for each in group]) for group in groups]
    how = {"baseline": ALGORITHM.baseline, "normalize_std": ALGORITHM.normalize_std}
    by_episode = torch.cat([group_advantages(each, **how) for each in rewards])  # [episode]
    members = [each for group in groups for each in group]
    sizes = torch.tensor([sum(each.mask) for each in members])  # [episode] sampled tokens
    sequence_ids = torch.arange(len(members)).repeat_interleave(sizes)  # [tokens]
    batch = collate_tokens(
        [np.array(each.token_ids) for each in members],
        [np.array(each.mask) for each in members], device="cpu",
    )  # fmt: skip
    new = token_logprobs(policy, batch, Scoring(chunk_tokens=4096, autocast=False))  # [tokens]
    old = torch.tensor([value for each in members for value in each.logprobs])  # [tokens]
    weights = importance_weights(
        log_ratio(new.detach(), old), sequence_ids, len(members), ALGORITHM, is_ratio_included=True
    )
    inputs = LossInputs(
        new_logprobs=new, anchor_logprobs=old, sampler_logprobs=old, is_weights=weights,
        advantages=by_episode[sequence_ids], sequence_ids=sequence_ids, num_sequences=len(members),
    )  # fmt: skip
    whole = Denominator(num_tokens=len(new), num_sequences=len(members))
    loss, metrics = policy_loss(inputs, whole, ALGORITHM)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    ratio = log_ratio(new.detach(), old).exp().mean().item()
    return {"ratio": ratio, "clipped": metrics["policy/clipped_frac"].item()}


def main() -> None:
    torch.manual_seed(0)
    policy = load_policy(MODEL, device="cpu", gradient_checkpointing=False)
    renderer = Renderer(AutoTokenizer.from_pretrained(MODEL))
    spec = Registry(["babyai"]).spec("babyai")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    ready = play(policy, spec, renderer, first_item=0)  # sampled by version 0
    for version in range(1, STEPS + 1):
        groups, ready = ready, play(policy, spec, renderer, first_item=version * GROUPS)
        found = train_on(policy, optimizer, groups)  # From the second step on it is one step stale.
        reward = np.mean([each.reward for group in groups for each in group])
        print(
            f"version {version}: reward {reward:.3f}", *(f"{k} {v:.3f}" for k, v in found.items())
        )


if __name__ == "__main__":
    main()
