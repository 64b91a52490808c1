"""A file of prompts as an environment: reward functions score the agent's answers.

Without `data.step` an episode has one turn. With it, the function answers each turn until it ends
the episode or `data.max_turns` are over.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from common.config.envs import EnvsSection
from common.errors import ConfigError
from common.formats.answers import tools_instruction
from common.formats.turns import FirstPrompt
from common.functions.calls import (
    OVERRUN_S,
    Caller,
    UserFunction,
    check_imports,
    check_keywords,
    load_function,
)
from common.functions.process import pack
from common.text import counted
from envhub.env import EnvFailure, EnvSpec, Isolation, StepResult, Style, SubsetSpec, parse_item
from envhub.envs.dataset.files import Record
from envhub.envs.dataset.generators import (
    FORM,
    NO_ANSWER,
    GeneratedRecords,
    instruction_for,
    is_generated,
    load_generated,
)
from envhub.envs.dataset.judges.judge import probe_of
from envhub.envs.dataset.prompts import SUBMIT, Message, Question, read_tools, tools_of, value_at
from envhub.envs.dataset.records import SUBSET, Dataset, load_dataset
from envhub.envs.dataset.rewards import RewardSum, load_rewards
from envhub.interop.texts import BadAction, arguments_of, is_call, parse_json

MARGIN_S = 10.0  # Seconds of a step beyond the limits of its functions.
SUBMIT_TOOL = {
    "name": SUBMIT,
    "description": "Ends the episode with your answer.",
    "parameters": {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything that the episodes share."""

    datasets: dict[str, Dataset]  # By subset.
    rewards: RewardSum
    caller: Caller
    step: UserFunction | None
    tools: list[dict[str, Any]]  # Tools of all items; []: none, or the items have their own.
    tools_column: str  # The column with the tools of an item; "": the items have none.
    subsets: dict[str, SubsetSpec]
    answer_form: str  # The form of a reference answer in a demonstration.
    instruction: str
    step_timeout_s: float
    success_from: float
    gives_facts: bool  # A finished episode has its record, for the rewards over a group.
    samples: list[str]  # Valid actions for random play.

    def tools_of(self, record: Record, place: str) -> list[dict[str, Any]]:
        """Return the tools that the answers to a record may call."""
        if not self.tools_column:
            return self.tools
        listed = value_at(record, self.tools_column) or []
        tools = tools_of(listed, f"data.tools={self.tools_column}: {place}")
        return with_submit(tools, has_step=self.step is not None)


class DatasetEnv:
    """One episode: a prompt, one or several answers, and the reward of the last one."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._is_done = True
        self._record: Record = {}
        self._messages: list[Message] = []
        self._state: dict[str, Any] = {}

    async def reset(self, item_id: str, seed: int) -> str:
        """Return the last message of an item's prompt. Raises: UnknownItem, EnvFailure."""
        item = parse_item(item_id, self._task.subsets)
        dataset = self._task.datasets[item.subset]
        split = dataset.splits[item.split]
        self._max_turns = self._task.subsets[item.subset].max_turns
        self._place = split.place(item.index)
        try:
            if isinstance(split.records, list):
                self._record = split.record(item.index)
            else:  # Generation may take seconds.
                self._record = await asyncio.to_thread(split.record, item.index)
            self._question = dataset.question(item.split, item.index)
        except ConfigError as error:
            raise EnvFailure(str(error)) from error
        self._tools = self._task.tools_of(self._record, self._place)
        self._call: dict[str, Any] | None = None
        self._messages = list(self._question.messages)
        self._state = {"item_id": item_id, "seed": seed, "num_turns": 0}
        self._is_done = False
        await self._task.caller.prepare()
        return self._messages[-1]["content"]

    def first_messages(self) -> list[Message]:
        """Return the messages before the last one of the prompt."""
        return self._question.messages[:-1]

    def item_tools(self) -> list[dict[str, Any]]:
        """Return the tools of the item; [] if all items have the same."""
        return self._tools if self._task.tools_column else []

    async def step(self, action: str) -> StepResult:
        """Record an answer; at the end of the episode, return its reward.

        An empty answer, or a call whose arguments are no object, is an invalid action. It ends an
        episode only at the limit of turns.

        Raises: EnvFailure.
        """
        if self._is_done:
            raise RuntimeError("step before reset, or after the episode has ended")
        self._state["num_turns"] += 1
        text, is_over = "", True
        try:
            completion, call = self._parsed(action)
        except BadAction as error:
            completion, call = action, None
            text, is_over = str(error), False
        is_valid = is_over
        self._call = call
        self._messages.append({"role": "assistant", "content": completion})
        if is_valid and self._task.step is not None and not (self._tools and call is None):
            text, is_over = await self._answered(self._task.step, completion, call)
        is_last = self._state["num_turns"] >= self._max_turns
        if not is_over and not is_last:
            self._messages.append({"role": "user", "content": text})
            reward = self._task.rewards.start_score
            facts = self._facts_so_far(completion) if self._task.gives_facts else None
            return StepResult(
                observation=text, reward=reward, done=False, is_valid=is_valid, facts=facts
            )
        return await self._scored(completion, text, is_limit=not is_over, is_valid=is_valid)

    def save(self) -> dict[str, Any]:
        """Return the conversation, and the state that the functions of the user receive."""
        return {"messages": self._messages, "state": self._state}

    def load(self, state: dict[str, Any]) -> None:
        """Continue a saved conversation."""
        self._messages, self._state = state["messages"], state["state"]

    async def _scored(
        self, completion: str, text: str, *, is_limit: bool, is_valid: bool
    ) -> StepResult:
        """Return the end of the episode with the reward of the answers.

        The reward is final also at the limit of turns, so that such an end is no truncation.
        """
        self._is_done = True
        began_s = time.monotonic()
        keywords, columns = self._offered(completion, self._call)
        scored = await self._task.rewards.score(self._task.caller, keywords, columns, self._place)
        metrics = {f"reward_{name}": value for name, value in scored.values.items()}
        metrics |= scored.costs
        metrics["reward_s"] = time.monotonic() - began_s
        if self._task.step is not None:
            metrics["at_limit"] = float(is_limit)
        return StepResult(
            observation=text or "The answer was received.",
            reward=scored.total,
            done=True,
            is_valid=is_valid,
            is_success=scored.total >= self._task.success_from,
            metrics=metrics,
            facts=self._facts(keywords, columns) if self._task.gives_facts else None,
        )

    def _facts(self, keywords: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
        """Return the values for functions over the group, in JSON types. Raises: EnvFailure."""
        names = ("messages", "completion", "prompts", "completions", "record")
        facts = {name: keywords[name] for name in names}
        facts |= {"columns": columns, "num_asked": keywords["num_asked"]}
        return self._packed(facts)

    def _facts_so_far(self, completion: str) -> dict[str, Any]:
        """Return the facts of an episode that a limit outside of this environment may end here.

        The learner takes the messages from its tokens. Raises: EnvFailure.
        """
        keywords, columns = self._offered(completion, None)
        texts = () if self._question.is_conversational else ("completions",)
        names = ("completion", "prompts", "record", *texts)
        return self._packed({"columns": columns, **{name: keywords[name] for name in names}})

    def _packed(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return facts in JSON types. Raises: EnvFailure: a value has none."""
        try:
            return pack(facts)
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvFailure(f"groups.reward cannot receive {self._place}: {error}") from error

    def _parsed(self, action: str) -> tuple[str, dict[str, Any] | None]:
        """Return the answer, and the call of a tool that it makes; None: it calls none.

        Raises: BadAction.
        """
        if not action.strip() and (self._tools or self._task.step is not None):
            raise BadAction("The answer is empty.")
        call = tool_call_of(action) if self._tools else None
        if call is not None and call["tool"] == SUBMIT:
            return str(call["arguments"].get("answer", "")), None
        return action, call

    async def _answered(
        self, user: UserFunction, completion: str, call: dict[str, Any] | None
    ) -> tuple[str, bool]:
        """Return the text of `data.step`, and whether it ends the episode. Raises: EnvFailure."""
        keywords, columns = self._offered(completion, call)
        offered = {**columns, **keywords}
        where = f"data.step={user.reference} failed on {self._place}"
        try:
            limit_s = self._task.step_timeout_s
            value = (await self._task.caller.call(user, offered, timeout_s=limit_s)).value
        except EnvFailure as error:
            raise EnvFailure(f"{where}: {error}") from error
        if value is None:
            return "", True
        is_pair = isinstance(value, (tuple, list)) and len(value) == 2
        if not is_pair or not isinstance(value[0], str) or not isinstance(value[1], bool):
            raise EnvFailure(f"{where}: returned {value!r:.200}, not (text, is_done)")
        return value[0], value[1]

    def _offered(
        self, completion: str, call: dict[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the keywords of a function, and the columns, which TRL's functions receive."""
        return offered_keywords(
            self._record, self._question, self._messages, self._state, completion, call
        )

    async def valid_actions(self) -> list[str]:
        """Return reference answers of a few records."""
        return [] if self._is_done else list(self._task.samples)

    async def expert_action(self) -> str | None:
        """Return the reference answer; None if the record has none."""
        answer = self._question.answer
        return None if self._is_done or answer is None else self._task.answer_form.format(answer)

    async def render(self) -> str:
        """Return the conversation as text."""
        return "\n\n".join(map(_shown, self._messages))

    async def fingerprint(self) -> str:
        """Return a digest of the prompt and the reference answer."""
        state = json.dumps([self._question.messages, self._question.answer])
        return hashlib.sha256(state.encode(errors="replace")).hexdigest()

    async def close(self) -> None:
        """Release nothing: an episode holds only memory."""


def offered_keywords(
    record: Record,
    question: Question,
    messages: list[Message],
    state: dict[str, Any],
    completion: str,
    call: dict[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords of a reward or step function, and the record's columns.

    Names of the keywords win over equal names of columns, but `answer`, `ground_truth` and
    `solution_str` are the columns if the record has them. `data.answer` wins over `answer` and
    `ground_truth`.
    """
    num_asked = len(question.messages)
    is_chat = question.is_conversational
    keywords: dict[str, Any] = {
        "prompt": question.messages[-1]["content"],
        "messages": list(messages),
        "num_asked": num_asked,
        "completion": completion,
        "record": record,
        "state": state,
        "call": call,
        "prompts": question.messages if is_chat else question.messages[-1]["content"],
        "completions": messages[num_asked:] if is_chat else completion,
    }
    names = {"answer": question.answer, "ground_truth": question.ground_truth}
    names["solution_str"] = completion
    columns = {str(name): value for name, value in record.items() if name not in question.replaced}
    return keywords, {**names, **columns}


def _shown(message: Message) -> str:
    """Return a message as text for people."""
    calls = [json.dumps(each["function"]) for each in message.get("tool_calls", [])]
    return "\n".join([f"{message['role']}: {message['content']}", *calls])


def with_submit(tools: list[dict[str, Any]], *, has_step: bool) -> list[dict[str, Any]]:
    """Return tools with the one that ends an episode of several turns."""
    return [*tools, SUBMIT_TOOL] if tools and has_step else tools


def tool_call_of(action: str) -> dict[str, Any] | None:
    """Return {"tool", "arguments"} of an action; None: it is no call.

    Raises: BadAction: the call cannot be parsed, or there are several, or its arguments are no
        object.
    """
    if not is_call(action):
        return None
    call = parse_json(action)
    if not isinstance(call.get("tool"), str):
        return None
    return {"tool": call["tool"], "arguments": arguments_of(call)}


def check(options: EnvsSection) -> list[str]:
    """Return why the dataset cannot be played, as one line; [] if it can."""
    try:
        task = load_task(options)
        _check_imports(task, f"data.step={options.dataset.step}")
    except ConfigError as error:
        return [str(error)]
    return []


def _check_imports(task: Task, step: str) -> None:
    """Call the functions of the user with an example. Raises: ConfigError: a package is missing."""
    dataset = next(iter(task.datasets.values()))
    answer = dataset.question("train", 0).answer
    keywords, columns = _example(dataset, NO_ANSWER if answer is None else str(answer))
    task.rewards.check_imports(keywords, columns)
    if task.step is not None:
        check_imports(step, task.step, {**columns, **keywords})


def _example(dataset: Dataset, completion: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords and the columns of an answer to the first record."""
    question = dataset.question("train", 0)
    messages = [*question.messages, {"role": "assistant", "content": completion}]
    state = {"item_id": f"{SUBSET}-train-0", "seed": 0, "num_turns": 1}
    record = dataset.splits["train"].record(0)
    return offered_keywords(record, question, messages, state, completion, None)


def load_task(section: EnvsSection) -> Task:
    """Return the records, the functions and the tools. Raises: ConfigError: one is wrong."""
    options = section.dataset
    if is_generated(options):
        datasets = load_generated(options)
    elif options.options:
        raise ConfigError(f"data.options={options.options}: only generated tasks have options")
    else:
        datasets = {SUBSET: load_dataset(options)}
    dataset = next(iter(datasets.values()))
    rewards = load_rewards(options, run_dir=section.run_dir)
    step = load_function("data.step", options.step) if options.step else None
    train = dataset.splits["train"]
    held_out = [dataset.splits["test"], dataset.splits["validation"]]
    splits = [train, *(each for each in held_out if each.records is not train.records)]
    tools, tools_column = read_tools(options, [(each.name, each.records) for each in splits])
    offered = _example(dataset, "")
    rewards.check(*offered)
    for each in datasets.values():
        _check_references(each, rewards)
        records = each.splits["train"].records
        if isinstance(records, GeneratedRecords) and rewards.verifies:
            records.check_verifier()
    if step is not None:
        check_keywords(f"data.step={options.step}", step, {**offered[1], **offered[0]})
    functions = [*rewards.functions, *filter(None, [step])]
    subsets = {
        name: SubsetSpec(
            num_train=len(each.splits["train"].numbers),
            num_test=len(each.splits["test"].numbers),
            num_validation=len(each.splits["validation"].numbers),
            max_turns=options.max_turns if step is not None else 1,
        )
        for name, each in datasets.items()
    }
    form = instruction_for(options)
    answer_form = FORM if form else "{}"
    tools = with_submit(tools, has_step=step is not None)
    return Task(
        datasets=datasets,
        rewards=rewards,
        caller=Caller(functions, memory_bytes=int(options.worker_memory_gib * 2**29)),
        step=step,
        tools=tools,
        tools_column=tools_column,
        subsets=subsets,
        answer_form=answer_form,
        instruction="\n".join(filter(None, [tools_instruction(tools) if tools else "", form])),
        step_timeout_s=options.reward_timeout_s,
        success_from=options.success_from,
        gives_facts=section.gives_facts,
        samples=[answer_form.format(each) for each in dataset.samples()] or [NO_ANSWER],
    )


def _check_references(dataset: Dataset, rewards: RewardSum) -> None:
    """Raise ConfigError if a record lacks the reference answer of a reward that ships.

    Generated records are not checked here, since each takes time; their rewards check them.
    """
    if not rewards.compared:
        return
    for split, data_split in dataset.splits.items():
        if not isinstance(data_split.records, list):
            continue
        places = [
            data_split.place(index)
            for index in range(len(data_split.numbers))
            if not dataset.reference(split, index).strip()
        ]
        if places:
            raise ConfigError(
                f"{places[0]}: the record has no reference answer, which reward"
                f" {', '.join(rewards.compared)} needs; {counted(len(places), 'such record')} in"
                f" the {split} data"
            )


def first_prompts(task: Task) -> Iterator[FirstPrompt]:
    """Yield the prompt of every item. Raises: ConfigError: a template fails on its record."""
    pairs = chain.from_iterable(each.first_prompts() for each in task.datasets.values())
    for prompt, record in pairs:
        if task.tools_column:
            tools = task.tools_of(record, prompt.place)
            yield replace(prompt, tools=tools, has_own_tools=bool(tools))
        else:
            yield prompt


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the catalogue entry of the dataset. Raises: ConfigError: it cannot be loaded."""
    section = options.dataset
    task = load_task(options)
    longest_s = task.rewards.longest_s
    if task.step is not None:
        longest_s += section.reward_timeout_s + OVERRUN_S + task.step.load_s

    def make(_: Style) -> DatasetEnv:
        return DatasetEnv(task)

    async def stop() -> None:
        await asyncio.to_thread(task.caller.close)

    return EnvSpec(
        name="dataset",
        subsets=task.subsets,
        instruction=dict.fromkeys(Style, task.instruction),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=section.max_sessions,
        max_workers=section.max_workers,
        sessions_key="envs.dataset.max_sessions",
        worker_memory_bytes=int(section.worker_memory_gib * 2**30),
        step_timeout_s=longest_s + MARGIN_S,
        start_score=task.rewards.start_score,
        takes_any_text=True,
        is_repeatable=False,  # A reward may ask a server.
        tools=tuple(task.tools),
        prompts=partial(first_prompts, task),
        content={
            key: digest for each in task.datasets.values() for key, digest in each.content.items()
        },
        stop=stop,
        service=probe_of(task.rewards.judges),
    )
