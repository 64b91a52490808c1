"""Demonstrations by the environments' own experts, written as AgentGym conversations."""

import asyncio
import itertools
import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from actor.rollout.env_client import Environments, HubClient
from actor.rollout.episode import first_text
from actor.rollout.scripted import ScriptedPolicy, ScriptedRender
from common.config.actor import ActorSection, AgentFormat
from common.config.curriculum import subsets_in_use
from common.errors import ConfigError
from common.formats.answers import in_react, worded
from common.wire.messages import PolicyKind
from tools.evaluate.play import PlannedEpisode
from tools.offline.branched import open_beside_random, play_in_branches
from tools.offline.config import SftConfig

logger = logging.getLogger(__name__)

CONCURRENCY = 32
NUM_PROGRESS_LINES = 5  # Times that progress is logged.
NUM_LEFT = 3  # First branches of an episode, one of which may have no return.
FIRST_INDEX = 500_000  # First index of a training item. Runs count up from 0 and do not reach it.


def demonstrate(cfg: SftConfig, url: str, token: str, path: Path) -> None:
    """Play `sft.num_demonstrations` episodes at the hub and write them to `path`.

    A share `sft.random_frac` is random valid play. The rest is the expert on `sft.expert_subsets`
    (all tasks if empty). Random play uses the other subsets, so that the policy learns all actions
    but is good at the chosen tasks only. Tasks are drawn by their weights.

    Episodes alternate between `sft.contexts`, or use `actor.context`. In fold and subagent both
    policies work in branches, and each segment is a record. Every other such episode has no return
    from its first, second or third branch, so that the policy learns from an ended one.

    In a share `sft.slip_frac` of the turns a random action replaces the expert's. These turns are
    masked from the loss; the expert's recovery is trained.

    Raises:
        ConfigError: the hub lacks a subset, or no subset is left. Also: `actor.format` uses the
            chat template's calls, or slips are combined with branches.
        EnvError: the hub failed.
    """
    if cfg.actor.format is AgentFormat.FUNCTION_CALL:
        raise ConfigError(
            f"actor.format={cfg.actor.format.value}: demonstrations contain no tool calls."
            " Use actor.format=plain or actor.format=react."
        )
    if cfg.sft.slip_frac and any(each.has_branches for each in _options(cfg)):
        raise ConfigError(
            f"sft.slip_frac={cfg.sft.slip_frac:g}: demonstrations with branches have no slips."
            " Use sft.slip_frac=0, or no context fold or subagent."
        )
    played = asyncio.run(_play_all(cfg, url, token))
    records = [record for own, _ in played for record in own]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    num_solved = sum(is_solved for _, is_solved in played)
    logger.info("demonstrations episodes=%d solved=%d file=%s", len(played), num_solved, path)


Played = tuple[list[dict[str, Any]], bool]  # (segments as records, whether the episode was solved)


def _options(cfg: SftConfig) -> list[ActorSection]:
    """Return the settings between which the episodes alternate."""
    return [replace(cfg.actor, context=each) for each in cfg.sft.contexts] or [cfg.actor]


async def _play_all(cfg: SftConfig, url: str, token: str) -> list[Played]:
    """Play all planned demonstrations concurrently; return the results in order."""
    slots, numbers = asyncio.Semaphore(CONCURRENCY), itertools.count(1)
    num_plans = cfg.sft.num_demonstrations
    ways = _options(cfg)

    async def play_one(place: int, plan: PlannedEpisode, environments: Environments) -> Played:
        """Play one demonstration with the settings of its place in the order."""
        number, way = divmod(place, len(ways))
        options = ways[way]
        async with slots:
            if options.has_branches:
                left = number // 2 % NUM_LEFT if number % 2 else -1
                played = await play_in_branches(environments, plan, options, left)
            else:
                played = await _play(environments, plan, cfg.actor, cfg.sft.slip_frac)
        if (done := next(numbers)) % max(1, num_plans // NUM_PROGRESS_LINES) == 0:
            logger.info("played episodes=%d of=%d", done, num_plans)
        return played

    query = urlencode([("subset", n) for n in subsets_in_use(cfg.curriculum, cfg.tasks)])
    path = f"/v1/envs?{query}" if query else "/v1/envs"
    async with HubClient(url, token=token, timeout_s=cfg.actor.env_timeout_s) as hub:
        plans = list(_plans(cfg, await hub.request("GET", path, None)))
        environments = await Environments.of(hub, style=cfg.envhub.style)
        return await asyncio.gather(
            *(play_one(place, plan, environments) for place, plan in enumerate(plans))
        )


def _plans(cfg: SftConfig, catalogue: dict[str, Any]) -> Iterator[PlannedEpisode]:
    """Yield the episodes in a fixed order, each with its own item."""
    chooser = random.Random(cfg.run.seed)
    expert_tasks = [
        task
        for task in cfg.tasks
        if not cfg.sft.expert_subsets or task.subset in cfg.sft.expert_subsets
    ]
    for name in cfg.sft.expert_subsets:
        if all(task.subset != name for task in cfg.tasks):
            raise ConfigError(f"sft.expert_subsets: {name!r} is not a subset of any task")
    random_tasks = [task for task in cfg.tasks if task.subset not in cfg.sft.expert_subsets]
    num_random = round(cfg.sft.num_demonstrations * cfg.sft.random_frac)
    num_played: dict[str, int] = {}
    for number in range(cfg.sft.num_demonstrations):
        is_random = number < num_random
        tasks = random_tasks if is_random else expert_tasks
        task = chooser.choices(tasks, weights=[max(t.weight, 1e-9) for t in tasks])[0]
        items = task.items()
        spec = catalogue.get(task.env, {}).get("subsets", {}).get(items)
        if spec is None or not spec["num_train"]:
            raise ConfigError(
                f"tasks: the hub has no training items {items!r} of {task.env!r}; choose a subset"
                " that `python run.py envs` lists"
            )
        index = FIRST_INDEX + num_played.get(items, 0)
        num_played[items] = index - FIRST_INDEX + 1
        yield PlannedEpisode(
            episode_id=f"{cfg.run.seed}/{number}",
            env=task.env,
            item_id=f"{items}-train-{index % spec['num_train']}",
            seed=0,
            horizon=spec["max_turns"],
            policy=PolicyKind.RANDOM_VALID if is_random else PolicyKind.EXPERT,
        )


def _shown_before(message: dict[str, str]) -> dict[str, Any]:
    """Return a message before the first observation in AgentGym's format."""
    if message["role"] == "assistant":
        return {"from": "gpt", "loss": False, "value": message["content"]}
    shown = {"from": "human", "loss": None, "value": message["content"]}
    return shown if message["role"] == "user" else shown | {"role": message["role"]}


async def _play(
    environments: Environments, plan: PlannedEpisode, actor: ActorSection, slip_frac: float
) -> Played:
    """Return the episode in AgentGym's format, and whether it was solved."""
    kind = actor.format
    render = ScriptedRender()
    policy = ScriptedPolicy(plan.policy, seed=plan.episode_id, render=render, slip_frac=slip_frac)
    instruction, answer = (
        each(plan.env) for each in (environments.instruction, environments.acknowledgement)
    )
    session = await open_beside_random(environments, plan, actor.seats.trained)
    instruction = worded(kind, instruction)
    messages: list[dict[str, Any]] = []
    text = session.first_observation
    if firsts := getattr(session, "first_messages", []):
        messages += [_shown_before(each) for each in firsts]
        text = first_text(instruction, text)
    elif answer:
        messages += [
            {"from": "human", "loss": None, "value": instruction},
            {"from": "gpt", "loss": False, "value": answer},
        ]
    else:
        text = first_text(instruction, text)
    messages.append({"from": "human", "loss": None, "value": text})
    reward = 0.0
    is_solved = False
    for turn in range(plan.horizon):
        action = render.action_text((await policy.act([], session)).token_ids)
        result = await session.step(action)
        reply = in_react(action) if kind is AgentFormat.REACT else action
        messages.append({"from": "gpt", "loss": not policy.has_slipped, "value": reply})
        reward = result.reward
        is_solved = result.is_success
        if result.done or turn + 1 == plan.horizon:
            break
        messages.append({"from": "human", "loss": None, "value": result.observation})
    await session.close()
    return [{"conversations": messages, "item_id": plan.item_id, "reward": reward}], is_solved
