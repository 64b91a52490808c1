"""Rewards over a group: functions of the user compare the finished members of one item.

`groups.reward` names them. They are called once all members of a group have ended, in processes of
their own. A group counts as complete after the call, so rewards decide whether it has signal.
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.config.groups import GroupsSection
from common.errors import ConfigError, EnvFailure
from common.formats.chat_template import render_chat
from common.formats.turns import Turns, measure_turns
from common.functions.calls import (
    Caller,
    UserFunction,
    check_imports,
    check_keywords,
    load_function,
)
from common.functions.process import unpack
from common.ids import subset_of
from common.segments import as_rows
from common.store.disk import DiskFull
from common.user_code import find_path
from common.wire.messages import Trajectory
from learner.recovery.reward_log import GroupReward, RewardLog

logger = logging.getLogger(__name__)

KEYS = ("function", "weight", "min", "max", "timeout_s", "retries")
NUMBERS = {  # Allowed values of the numbers of a reward.
    "weight": (-1e6, 1e6),
    "min": (-1e6, 1e6),
    "max": (-1e6, 1e6),
    "timeout_s": (1e-3, 1e5),
    "retries": (0, 100),
}
MAX_CALLS = 16  # Most groups whose functions run at once.
BACKOFF_S = 0.5  # Seconds before the first retry. The wait doubles with each retry.
STOP_S = 5.0
DIGITS = 9
LOGS = ("log_metric", "log_extra")
# Keywords of every call. Columns of a record add theirs. Each is a list with an entry per member.
KEYWORDS = (
    *("group", "prompts", "completions", "completion_ids", "trajectories", "rewards"),
    *("states", "answers", "infos", "tasks"),
)
# Columns that the dataset adds to those of the record.
OF_ITEM = ("answer", "ground_truth")
ANSWERED = "solution_str"
OF_VERIFIERS = frozenset(("states", "answers", "infos", "tasks"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerm:
    """One named function over a group."""

    name: str
    user: UserFunction
    weight: float
    least: float  # The smallest number that the function returns.
    most: float
    timeout_s: float
    retries: int

    @property
    def has_texts(self) -> bool:
        """Whether prompts and completions keep the form of a dataset, as TRL passes them.

        Other functions, such as those of verifiers, get lists of messages.
        """
        return OF_VERIFIERS.isdisjoint(self.user.keywords)

    @property
    def neutral(self) -> float:
        """The value for a member to which the function does not apply."""
        return min(max(0.0, self.least), self.most)

    def numbers(self, value: Any, num_members: int) -> list[float | None]:
        """Return a returned value as one number for each member. Raises: EnvFailure: it is none."""
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, (list, tuple)):
            raise EnvFailure(f"returned {value!r:.200}, not a list of {num_members} numbers")
        if len(value) != num_members:
            raise EnvFailure(
                f"returned {len(value)} numbers for a group of {num_members} finished members:"
                f" {value!r:.200}"
            )
        return [self._number(each, index) for index, each in enumerate(value)]

    def _number(self, value: Any, index: int) -> float | None:
        if value is None:
            return None
        if not isinstance(value, (bool, int, float)):
            raise EnvFailure(f"returned {value!r:.200} for member {index}, which is not a number")
        if not math.isfinite(value):
            raise EnvFailure(f"returned {value} for member {index}, which is not finite")
        if not self.least <= value <= self.most:
            raise EnvFailure(
                f"returned {value:g} for member {index}, outside of [{self.least:g},"
                f" {self.most:g}]; set groups.reward.{self.name}.min and .max"
            )
        return float(value)


class GroupRewardSum:
    """The weighted sum of the environment's reward and the functions, mapped to [0, 1].

    Example: weight 1 for the environment's reward 1, weight 1 for the value 0.5 of a function in
    [0, 1]. The sum is 1.5 of 2, so the reward is 0.75.
    """

    def __init__(self, terms: Sequence[GroupTerm], *, environment_weight: float) -> None:
        self.terms = terms
        self._weight = environment_weight
        bounds = [sorted((t.weight * t.least, t.weight * t.most)) for t in terms]
        self._least = sum(low for low, _ in bounds)
        self._range = environment_weight + sum(high for _, high in bounds) - self._least

    @property
    def functions(self) -> list[UserFunction]:
        return [term.user for term in self.terms]

    @property
    def formula(self) -> str:
        """The reward R of an episode, for the printed objective."""
        terms = [f"{self._weight:g}*environment"] if self._weight else []
        for term in self.terms:
            bounds = f" in [{term.least:g}, {term.most:g}]" * ((term.least, term.most) != (0, 1))
            reference = term.user.reference.rpartition("/")[2]
            terms.append(f"{term.weight:+g}*{term.name}({reference}{bounds})")
        low = f" - {self._least:g}".replace("- -", "+ ") if self._least else ""
        return f"R=({' '.join(terms)}{low}) / {self._range:g}"

    def reward(
        self, members: Sequence[Trajectory], values: Mapping[str, list[float | None]]
    ) -> GroupReward:
        """Return the rewards of members. Raises: EnvFailure: no function applies to a member."""
        rewards: dict[int, float] = {}
        for index, member in enumerate(members):
            numbers = {term.name: values[term.name][index] for term in self.terms}
            if not self._weight and all(number is None for number in numbers.values()):
                raise EnvFailure(f"no function applies to member {index}: each returned None")
            total = self._weight * member.reward
            for term in self.terms:
                number = numbers[term.name]
                total += term.weight * (term.neutral if number is None else number)
            rewards[member.member] = self._mapped(total)
        # The score of an episode whose functions have neutral values.
        neutral = sum(term.weight * term.neutral for term in self.terms)
        return GroupReward(
            group_id=members[0].group_id,
            rewards=rewards,
            scale=self._weight / self._range,
            shift=(neutral - self._least) / self._range,
            values=dict(values),
        )

    def _mapped(self, total: float) -> float:
        share = (total - self._least) / self._range
        return round(min(max(share, 0.0), 1.0), DIGITS)


def load_group_rewards(cfg: GroupsSection) -> GroupRewardSum | None:
    """Return the functions of `groups.reward`, None without one.

    Raises: ConfigError: a key is wrong, or a function cannot be loaded or takes no group.
    """
    if cfg.reward in (None, ""):
        return None
    terms = [_term(name, entry, cfg) for name, entry in _entries(cfg.reward).items()]
    if not any(term.weight for term in terms):
        raise ConfigError("groups.reward: the weight of every function is 0; give one another one")
    return GroupRewardSum(terms, environment_weight=cfg.environment_weight)


def check_group_rewards(cfg: GroupsSection) -> None:
    """Load the functions of `groups.reward`, and call each with an example of a group.

    Raises: ConfigError: as `load_group_rewards`, or a call fails because a package is missing.
    """
    rewards = load_group_rewards(cfg)
    for term in rewards.terms if rewards is not None else ():
        members = [_example_member(number, cfg.size) for number in range(cfg.size)]
        offered = offered_keywords(members, has_texts=term.has_texts)
        # The columns of a record are known only with an episode.
        columns = {name: [""] * cfg.size for name in term.user.needed if name not in LOGS}
        check_imports(_where(term), term.user, {**columns, **offered})


def group_reward_digests(cfg: GroupsSection) -> dict[str, str]:
    """Return the digests of the functions' files, by the key and the value that name them.

    A function of a module has none: its process imports it.
    """
    digests: dict[str, str] = {}
    for name, entry in _entries(cfg.reward).items() if cfg.reward else ():
        reference = entry if isinstance(entry, str) else str(entry["function"])
        file, key = reference.rpartition(":")[0], f"groups.reward.{name}"
        if file.endswith(".py"):
            content = find_path(key, file).read_bytes()
            digests[f"{key}={reference}"] = hashlib.sha256(content).hexdigest()
    return digests


def _entries(reward: Any) -> dict[str, Any]:
    """Return the entries of `groups.reward` by name. Raises: ConfigError: it is no map."""
    if isinstance(reward, str):
        return {re.sub(r"\W", "_", reward.rpartition(":")[2]) or "function": reward}
    if isinstance(reward, dict) and reward:
        return {str(name): entry for name, entry in reward.items()}
    raise ConfigError(
        f"groups.reward={reward}: expects module:function, file.py:function, or a map from"
        " names to functions"
    )


def _term(name: str, entry: Any, cfg: GroupsSection) -> GroupTerm:
    """Return the function of one entry of the map. Raises: ConfigError."""
    key = f"groups.reward.{name}"
    if not name.isidentifier():
        raise ConfigError(f"{key}: the name must consist of letters, digits and _")
    fields = {"function": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not isinstance(fields.get("function"), str):
        raise ConfigError(f"{key}={entry}: expects a function, or a section with function=...")
    for field, value in fields.items():
        if field not in KEYS:
            raise ConfigError(f"{key}.{field}={value}: no such key; there are {', '.join(KEYS)}")
        if field in NUMBERS:
            low, high = NUMBERS[field]
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise ConfigError(f"{key}.{field}={value}: must be a number in [{low:g}, {high:g}]")
    least = float(fields.get("min", 0.0))
    most = float(fields.get("max", 1.0))
    if least >= most:
        raise ConfigError(f"{key}.min={least:g}: must be < {key}.max={most:g}")
    user = load_function(key, fields["function"])
    _check_signature(f"{key}={user.reference}", user)
    return GroupTerm(
        name=name,
        user=user,
        weight=float(fields.get("weight", 1.0)),
        least=least,
        most=most,
        timeout_s=float(fields.get("timeout_s", cfg.reward_timeout_s)),
        retries=int(fields.get("retries", 0)),
    )


def _check_signature(where: str, user: UserFunction) -> None:
    """Raise ConfigError if a function takes no list of members.

    Columns of a record are known only with an episode, so a missing one fails the group.
    """
    if user.keywords.isdisjoint(KEYWORDS) and not user.takes_all:
        named = ", ".join(sorted(user.keywords)) or "none"
        raise ConfigError(
            f"{where}: the function takes no group; its parameters are {named}. Name one of"
            f" {', '.join(KEYWORDS)}, or use it as `reward`, which scores one episode at a time"
        )


def _where(term: GroupTerm) -> str:
    """Return the key and the value of a function, for messages."""
    return f"groups.reward.{term.name}={term.user.reference}"


def _example_member(number: int, num_members: int) -> dict[str, Any]:
    """Return an example of a finished episode, in the form of `MemberTexts.member`."""
    asked = {"role": "user", "content": "How much is 1 + 1?"}
    text = f"It is {number + 2}."
    answer = {"role": "assistant", "content": text}
    return {
        "member": number,
        "episode_id": f"example/{number}",
        "env": "example",
        "item_id": "all-train-0",
        "prompt": asked["content"],
        "messages": [asked, answer],
        "num_asked": 1,
        "completion": text,
        "answer": "2",
        "record": {},
        "columns": {},
        "reward": 1 - number / num_members,
        "is_success": number == 0,
        "end_reason": "done",
        "num_turns": 1,
        "num_tokens": 2 + number,
        "metrics": {},
        "trl_prompt": [asked],
        "trl_completion": [answer],
        "completion_ids": [5] * (2 + number),
    }


class MemberTexts:
    """The messages of an episode, from its tokens and its environment's facts."""

    def __init__(self, tokenizer: Any) -> None:
        """Measure the chat template; without a usable one, texts keep the template's marks."""
        self._tokenizer = tokenizer
        self._marks = [str(each) for each in tokenizer.all_special_tokens]
        self._turns: Turns | None = None
        try:
            self._turns = measure_turns(
                lambda messages, is_asking: render_chat(
                    tokenizer, [*messages], add_generation_prompt=is_asking
                )
            )
        except (ConfigError, ValueError) as error:
            logger.warning("rewards over a group get texts with the template's marks: %s", error)

    def messages(self, trajectory: Trajectory) -> tuple[list[dict[str, str]], int]:
        """Return the messages of an episode, and how many precede its first answer.

        An episode of several segments has the messages of each segment in turn.
        """
        messages: list[dict[str, str]] = []
        num_asked = -1
        for row in as_rows(trajectory):
            edges = [0, *((row.loss_mask[1:] != row.loss_mask[:-1]).nonzero()[0] + 1).tolist()]
            for start, end in zip(edges, [*edges[1:], len(row.token_ids)], strict=True):
                ids = row.token_ids[start:end].tolist()
                if row.loss_mask[start]:
                    num_asked = len(messages) if num_asked < 0 else num_asked
                    text = self._tokenizer.decode(ids, skip_special_tokens=True).strip()
                    messages.append({"role": "assistant", "content": text})
                else:
                    raw = self._tokenizer.decode(ids, skip_special_tokens=False)
                    messages += self._prompted(raw) if start == 0 else self._observed(raw)
        return messages, len(messages) if num_asked < 0 else num_asked

    def _prompted(self, raw: str) -> list[dict[str, str]]:
        """Return the messages before an answer."""
        turns = self._turns
        if turns is None:
            return [{"role": "user", "content": self._plain(raw)}]
        pieces = raw.removesuffix(turns.after_user).split(turns.between)
        messages: list[dict[str, str]] = []
        for number, piece in enumerate(pieces):
            is_system = number == 0 and not piece.startswith(turns.before) and len(pieces) > 1
            content = piece.removeprefix(turns.before) if number == 0 else piece
            if is_system:
                system = self._plain(content).removeprefix("system").strip()
                messages.append({"role": "system", "content": system})
                continue
            asked, answered, answer = content.partition(turns.closed + turns.answered)
            messages.append({"role": "user", "content": self._plain(asked)})
            if answered and turns.closed:
                messages.append({"role": "assistant", "content": self._plain(answer)})
        return messages

    def _observed(self, raw: str) -> list[dict[str, str]]:
        """Return the message between two answers; [] for the template's own text alone."""
        turns = self._turns
        if turns is not None:
            # The policy may have sampled the begin of the template's text between two turns.
            begins = (turns.between[start:] for start in range(len(turns.between)))
            begin = next((each for each in begins if raw.startswith(each)), "")
            if not begin and raw.strip() in turns.ended:
                return []
            raw = raw.removeprefix(begin).removesuffix(turns.after_user)
        text = self._plain(raw)
        return [{"role": "user", "content": text}] if text else []

    def _plain(self, text: str) -> str:
        for mark in self._marks:
            text = text.replace(mark, "")
        return text.strip()

    def member(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the facts of a finished episode that functions receive."""
        messages, num_asked = self.messages(trajectory)
        facts: dict[str, Any] = unpack(json.loads(trajectory.facts)) if trajectory.facts else {}
        columns = facts.get("columns", {})
        whole = facts.get("messages") or messages
        num_asked = int(facts.get("num_asked", num_asked))
        answers = [each["content"] for each in whole if each["role"] == "assistant"]
        answered = [each["content"] for each in whole[num_asked:] if each["role"] == "assistant"]
        last = answered[-1] if answered else ""
        return {
            "member": trajectory.member,
            "episode_id": trajectory.episode_id,
            "env": trajectory.env,
            "item_id": trajectory.item_id,
            "prompt": whole[num_asked - 1]["content"] if num_asked else "",
            "messages": whole,
            "num_asked": num_asked,
            "completion": facts.get("completion", last if answers else ""),
            "answer": columns.get("answer", ""),
            "record": facts.get("record", {}),
            "columns": columns,
            "reward": trajectory.reward,
            "is_success": trajectory.is_success,
            "end_reason": trajectory.end_reason.value,
            "num_turns": trajectory.num_turns,
            "num_tokens": int(trajectory.loss_mask.sum()),
            "metrics": dict(trajectory.metrics),
            "trl_prompt": facts.get("prompts", whole[:num_asked]),
            "trl_completion": facts.get("completions", whole[num_asked:]),
            "completion_ids": trajectory.token_ids[trajectory.loss_mask].tolist(),
        }


def with_item_facts(members: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return members of a group that all have the record and the columns of their common item.

    An episode that ends at a limit of tokens has no facts; those of the item are the same for all
    members. Without any facts in the group, there is nothing to add.

    Raises: EnvFailure: a member lacks a column that is no part of the item.
    """
    source = next((member for member in members if member["columns"]), None)
    if source is None:
        return list(members)
    return [m if m["columns"] else _with_facts_of(m, source) for m in members]


def _with_facts_of(member: dict[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a member with the facts of its item, in the form of a member that has them."""
    lacking = sorted(source["columns"].keys() - {*source["record"], *OF_ITEM, ANSWERED})
    if lacking:
        raise EnvFailure(
            f"member {member['member']} ended without the column {lacking[0]!r} of the others"
        )
    columns = dict(source["columns"])
    if ANSWERED in columns and ANSWERED not in source["record"]:
        columns[ANSWERED] = member["completion"]
    is_text = isinstance(source["trl_prompt"], str)
    return {
        **member,
        "answer": source["answer"],
        "record": source["record"],
        "columns": columns,
        "trl_prompt": source["trl_prompt"],
        "trl_completion": member["completion"] if is_text else member["trl_completion"],
    }


# Parts of a member that only build the keywords of a call.
PRIVATE = ("columns", "trl_prompt", "trl_completion", "num_asked", "completion_ids")


def offered_keywords(members: Sequence[Mapping[str, Any]], *, has_texts: bool) -> dict[str, Any]:
    """Return the keywords of a call; each is a list with one entry for each member.

    Args:
        has_texts: as `GroupTerm.has_texts`.
    """
    columns = [member["columns"] for member in members]
    shared = [name for name in columns[0] if all(name in each for each in columns)]
    prompts = [m["messages"][: m["num_asked"]] for m in members]
    completions = [m["messages"][m["num_asked"] :] for m in members]
    return {
        **{name: [each[name] for each in columns] for name in shared},
        "group": [{k: v for k, v in m.items() if k not in PRIVATE} for m in members],
        "prompts": [m["trl_prompt"] for m in members] if has_texts else prompts,
        "completions": [m["trl_completion"] for m in members] if has_texts else completions,
        "completion_ids": [m["completion_ids"] for m in members],
        "trajectories": [m["messages"] for m in members],
        "rewards": [m["reward"] for m in members],
        "answers": [m["answer"] for m in members],
        "infos": [_info_of(m) for m in members],
        "tasks": [_task_of(m) for m in members],
        "states": [
            {
                "prompt": prompt,
                "completion": completion,
                "answer": m["answer"],
                "task": _task_of(m),
                "info": _info_of(m),
                "reward": m["reward"],
                "metrics": m["metrics"],
                "is_completed": True,
                "stop_condition": m["end_reason"],
                "example_id": m["item_id"],
                "trajectory": _steps_of(completion),
                "turn": len(_steps_of(completion)),
            }
            for m, prompt, completion in zip(members, prompts, completions, strict=True)
        ],
    }


def _steps_of(completion: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a step of verifiers for each answer of the policy.

    Its `prompt` is left out: with it, the size of a call would grow with the square of the turns.
    """
    return [{"completion": [each]} for each in completion if each["role"] == "assistant"]


def _info_of(member: Mapping[str, Any]) -> Any:
    """Return the column `info` of a member's record; JSON text is read, as by verifiers."""
    info = member["columns"].get("info", {})
    if isinstance(info, str):
        with suppress(ValueError):  # A plain text.
            return json.loads(info)
    return info


def _task_of(member: Mapping[str, Any]) -> Any:
    """Return the task of a member's record, as verifiers does, else environment and subset."""
    return member["columns"].get("task", f"{member['env']}/{subset_of(member['item_id'])}")


class GroupRewarder(threading.Thread):
    """Calls the functions over groups in its own thread.

    Consumes: members of complete groups, by `begin`.
    Waits for: the functions, each with its time limit; `MAX_CALLS` groups run at once.
    Unblocked by: `stop`.

    Example: begin([a, b, c]) -> the functions return 3 numbers each, the rewards are logged, the
    future has them. A function raises an error -> the future has a reward with this error, and the
    learner reports the members as failed.
    """

    def __init__(self, rewards: GroupRewardSum, log: RewardLog, texts: MemberTexts) -> None:
        super().__init__(name="group-rewards", daemon=True)
        self._rewards = rewards
        self._log = log
        self._texts = texts
        self._loop = asyncio.new_event_loop()
        self._stop_requested = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._lock = threading.Lock()  # Guards the metrics below.
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._num_waiting = 0

    # --- for any thread -------------------------------------------------------------------------

    def begin(self, members: Sequence[Trajectory]) -> Future[GroupReward]:
        """Return the pending rewards of a group's finished members."""
        logged = self._log.rewards.get(members[0].group_id)
        if logged is not None:
            done: Future[GroupReward] = Future()
            done.set_result(logged)
            return done
        with self._lock:
            self._num_waiting += 1
        return asyncio.run_coroutine_threadsafe(self._reward(members), self._loop)

    def drain_metrics(self) -> dict[str, float]:
        """Return metrics of the calls since the last call."""
        with self._lock:
            metrics = {
                name: total / self._counts[name] if name in self._counts else total
                for name, total in self._sums.items()
            }
            metrics["group_rewards/waiting"] = float(self._num_waiting)
            self._sums = {}
            self._counts = {}
        return metrics

    def stop(self) -> None:
        """End the thread and the processes. Groups without rewards stay in the journal."""
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._stop_requested.set)
            self.join(timeout=STOP_S)
        self._log.close()

    # --- this thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped."""
        asyncio.set_event_loop(self._loop)
        self._caller = Caller(
            self._rewards.functions, busy_remedy="lower the time of a call of groups.reward"
        )
        try:
            self._loop.run_until_complete(self._stop_requested.wait())
        finally:
            self._loop.run_until_complete(self._cancel_all())
            self._caller.close()
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reward(self, members: Sequence[Trajectory]) -> GroupReward:
        """Return the logged rewards of a group."""
        async with self._slots:
            began_s = time.monotonic()
            group_id = members[0].group_id
            try:
                texts = with_item_facts([self._texts.member(each) for each in members])
                calls = [self._values(term, texts) for term in self._rewards.terms]
                values = await asyncio.gather(*calls)
                named = {t.name: v for t, v in zip(self._rewards.terms, values, strict=True)}
                reward = self._rewards.reward(members, named)
            except EnvFailure as error:
                logger.error(
                    "no reward of group=%s item=%s: %s", group_id, members[0].item_id, error
                )
                reward = GroupReward(group_id=group_id, error=f"{error}")
            self._note(reward, time.monotonic() - began_s)
            await asyncio.to_thread(self._log.append, reward, check=self._check)
        return reward

    def _check(self) -> None:
        if self._stop_requested.is_set():
            raise DiskFull("stopped while the disk is full")

    async def _values(
        self, term: GroupTerm, members: Sequence[Mapping[str, Any]]
    ) -> list[float | None]:
        """Return the numbers of one function; a failed call is repeated. Raises: EnvFailure."""
        offered = offered_keywords(members, has_texts=term.has_texts)
        where = _where(term)
        for attempt in range(term.retries + 1):
            try:
                _check_offered(where, term.user, offered)
                returned = await self._caller.call(
                    term.user, offered, timeout_s=term.timeout_s, takes_logs=True
                )
                return term.numbers(returned.value, len(members))
            except EnvFailure as error:
                if attempt == term.retries:
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    item = members[0]["item_id"]
                    raise EnvFailure(f"{where} failed on item {item}{tries}: {error}") from error
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    def _note(self, reward: GroupReward, took_s: float) -> None:
        """Add a group to the metrics."""
        means = {"group_rewards/s": [took_s], "group_rewards/failed": [float(bool(reward.error))]}
        if not reward.error:
            means["group_rewards/mean"] = list(reward.rewards.values())
        for name, values in reward.values.items():
            means[f"group_rewards/{name}_mean"] = [each for each in values if each is not None]
        with self._lock:
            self._num_waiting -= 1
            for name, numbers in means.items():
                if numbers:
                    self._sums[name] = self._sums.get(name, 0.0) + sum(numbers)
                    self._counts[name] = self._counts.get(name, 0) + len(numbers)


def _check_offered(where: str, user: UserFunction, offered: Mapping[str, Any]) -> None:
    """Raise EnvFailure if a function needs a keyword that the environment does not give."""
    try:
        check_keywords(where, user, {**offered, **dict.fromkeys(LOGS)})
    except ConfigError as error:
        raise EnvFailure(str(error)) from error
