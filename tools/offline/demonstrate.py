"""Demonstrations by the environments' own experts, written as AgentGym conversations."""

import asyncio
import itertools
import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from actor.formats.thoughts import FIELDS
from actor.rollout.context import Turn
from actor.rollout.env_client import Environments, HubClient
from actor.rollout.episode import EnvSession, first_text, run_episode, task_text
from actor.rollout.folding import CALL, RETURN
from actor.rollout.scripted import ScriptedPolicy, ScriptedRender
from actor.seats.seats import Seats
from common.config.actor import ActorSection, AgentFormat, AgentOptions, SeatsOptions
from common.config.curriculum import subsets_in_use
from common.errors import ConfigError, EnvError
from common.formats.answers import in_react
from common.segments import as_rows
from common.store.run_dir import write_atomically
from common.wire.messages import PolicyKind
from tools.evaluate.play import PlannedEpisode, lease_of
from tools.offline.config import SftConfig

logger = logging.getLogger(__name__)


# Token limit that is never reached. Training cuts segments that are too long for it.
NO_END = 10**6
DEADLINE_S = 600.0
CONCURRENCY = 32
NUM_PROGRESS_LINES = 5  # Times that progress is logged.
NUM_LEFT = 3  # First branches of an episode, one of which may have no return.
FIRST_INDEX = 500_000  # First index of a training item. Runs count up from 0 and do not reach it.
Played = tuple[list[dict[str, Any]], bool]  # (segments as records, whether the episode was solved)


class MessageRender(ScriptedRender):
    """Encodes each message as one token, so that the tokens of a segment identify its messages."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[int, dict[str, Any]] = {}  # Messages that the policy does not sample.

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        if before is None:
            return self._add_observation(text)
        return [
            *self._add_observation(before[0]),
            *self.add(before[1]),
            *self._add_observation(text),
        ]

    def opened(self, messages: list[dict[str, Any]], text: str) -> list[int]:
        """Return the tokens of messages and a user's message after them."""
        before = [self._add_message(each) for each in messages]
        return [*(token for ids in before for token in ids), *self._add_observation(text)]

    def after_action(
        self, observation: str, *, is_stopped: bool, end: int | None = None
    ) -> list[int]:
        return self._add_observation(observation)

    def after_turn(self, text: str, *, is_stopped: bool, end: int | None = None) -> list[int]:
        return self._add_observation(text)

    def _add_observation(self, text: str) -> list[int]:
        """Return the ids of an observation, which the policy does not sample."""
        return self._add_message({"role": "user", "content": text})

    def _add_message(self, message: dict[str, Any]) -> list[int]:
        """Return the ids of a message that the policy does not sample."""
        ids = self.add(message["content"])
        self._shown |= dict.fromkeys(ids, message)
        return ids

    def message(self, token_id: int, *, is_learnt: bool) -> dict[str, Any]:
        """Return the message of a token in AgentGym's format."""
        if token_id in self._shown:
            return _shown_before(self._shown[token_id])
        return {"from": "gpt", "loss": is_learnt, "value": self.action_text([token_id])}


class BranchingPolicy:
    """Plays a scripted policy's actions in branches of half the allowed turns."""

    def __init__(
        self,
        policy: ScriptedPolicy,
        render: ScriptedRender,
        *,
        options: AgentOptions,
        unreturned: int = -1,
    ) -> None:
        """Begin outside of branches. The branch with the number `unreturned` gets no return."""
        self._policy = policy
        self._render = render
        self._most = options.branch_turns
        self._form = options.format
        self._unreturned = unreturned
        self._num_calls = 0
        self._next: Turn | None = None  # The action that the call named.
        self._latest = ""
        self._num_left = -1  # Turns left in the branch; -1: in no branch.

    async def act(self, ids: list[int], session: EnvSession) -> Turn:
        """Return the next action, or the call or return of a branch. Raises: EnvError."""
        if self._num_left == 0:
            self._num_left = -1
            # Equal: the branch has just been ended by its limit.
            if self._num_calls != self._unreturned + 1:
                return self._scripted_turn(f"<{RETURN}>{self._latest}</{RETURN}>")
        taken = self._next or await self._policy.act(ids, session)
        text = self._render.action_text(taken.token_ids)
        if self._num_left < 0:
            is_left = self._num_calls == self._unreturned
            self._num_calls += 1
            self._next = taken
            self._num_left = self._most if is_left else self._most // 2
            return self._scripted_turn(f"<{CALL}>{text}</{CALL}>")
        self._next = None
        self._latest = text
        self._num_left -= 1
        return self._scripted_turn(in_react(text) if self._form is AgentFormat.REACT else text)

    def _scripted_turn(self, text: str) -> Turn:
        return Turn(self._render.add(text), logprobs=[0.0], versions=[-1])


async def open_beside_random(
    environments: Environments, plan: PlannedEpisode, trained: list[int]
) -> EnvSession:
    """Return a session for a demonstration. In a game with seats, the other seats play at random.

    Args:
        trained: the seats that demonstrations play; [] means all.

    Raises: EnvError, EnvTimeout.
    """
    seats = Seats(ActorSection(seats=SeatsOptions(trained=trained)))
    lease = lease_of(plan, attempt=0, deadline_s=DEADLINE_S)
    scripted = ScriptedRender()
    policy = ScriptedPolicy(plan.policy, seed=plan.episode_id, render=scripted)
    open_seat = seats.opener(
        lease,
        partial(environments.open, plan.env, plan.item_id, seed=plan.seed),
        make_policy=lambda _: (policy.act, scripted),
        task=("", ""),
        texts={},
    )
    return await open_seat()


async def play_in_branches(
    environments: Environments, plan: PlannedEpisode, options: AgentOptions, unreturned: int = -1
) -> tuple[list[dict[str, Any]], bool]:
    """Return an episode's segments in AgentGym's format, and whether it was solved.

    Args:
        unreturned: number of the branch without a return; -1: all branches return.

    Raises: ConfigError: `branch_turns` is below 2; EnvError: the hub failed.
    """
    if options.branch_turns < 2:
        raise ConfigError(
            f"actor.branch_turns={options.branch_turns}: demonstrated branches need at least 2"
        )
    render = MessageRender()
    scripted = ScriptedPolicy(plan.policy, seed=plan.episode_id, render=render)
    policy = BranchingPolicy(scripted, render, options=options, unreturned=unreturned)
    played = await run_episode(
        lease_of(plan, attempt=0, deadline_s=DEADLINE_S),
        open_session=lambda: open_beside_random(environments, plan, options.seats.trained),
        act=policy.act,
        render=render,
        instruction=environments.instruction(plan.env),
        acknowledgement=environments.acknowledgement(plan.env),
        max_tokens=NO_END,
        turn_tokens=1,
        actor="demonstration",
        options=options,
    )
    if played.end_reason.is_infrastructure_failure:
        raise EnvError(f"{plan.item_id}: {played.end_reason.value}: {played.error}")
    records: list[dict[str, Any]] = []
    rows = as_rows(played)
    for segment, row in enumerate(rows):
        tokens = zip(row.token_ids.tolist(), row.loss_mask.tolist(), strict=True)
        messages = [render.message(token, is_learnt=learnt) for token, learnt in tokens]
        records.append(
            {
                **{"conversations": messages, "env": plan.env, "item_id": plan.item_id},
                **{"episode_id": plan.episode_id, "reward": played.reward},
                "success": played.is_success,
                **{"segment": segment, "num_segments": len(rows)},
            }
        )
    return records, played.is_success


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
    num_random = round(cfg.sft.num_demonstrations * cfg.sft.random_frac)
    if num_random and cfg.tasks and all(t.subset in cfg.sft.expert_subsets for t in cfg.tasks):
        raise ConfigError(
            f"sft.random_frac={cfg.sft.random_frac:g}: random play uses the subsets that"
            " sft.expert_subsets leaves out, and it lists those of all tasks. Use"
            " sft.random_frac=0 or fewer subsets."
        )
    played = asyncio.run(_play_all(cfg, url, token))
    records = [record for own, _ in played for record in own]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
    num_solved = sum(is_solved for _, is_solved in played)
    logger.info("demonstrations episodes=%d solved=%d file=%s", len(played), num_solved, path)


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


def _shown_before(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message before the first observation in AgentGym's format."""
    fields = {name: message.get(name) for name in ("tool_calls", "tool_call_id")}
    fields["thoughts"] = message.get(FIELDS[0])
    more = {name: value for name, value in fields.items() if value}
    if message["role"] == "assistant":
        return {"from": "gpt", "loss": False, "value": message["content"], **more}
    shown = {"from": "human", "loss": None, "value": message["content"], **more}
    return shown if message["role"] == "user" else shown | {"role": message["role"]}


async def _play(
    environments: Environments, plan: PlannedEpisode, actor: ActorSection, slip_frac: float
) -> Played:
    """Return the episode in AgentGym's format, and whether it was solved."""
    kind = actor.format
    render = ScriptedRender()
    policy = ScriptedPolicy(plan.policy, seed=plan.episode_id, render=render, slip_frac=slip_frac)
    instruction = environments.instruction(plan.env)
    answer = environments.acknowledgement(plan.env)
    session = await open_beside_random(environments, plan, actor.seats.trained)
    instruction = task_text(kind, instruction, tools=getattr(session, "tools", []))
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
    item = {"env": plan.env, "item_id": plan.item_id}
    result = {"reward": reward, "success": is_solved}
    return [{"conversations": messages, **item, **result}], is_solved
