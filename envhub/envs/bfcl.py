"""BFCL: multi-turn tasks with tools of the Berkeley Function-Calling Leaderboard (V4).

The package's own code executes the calls on its simulated APIs and checks the episode. One message
of the user follows the other; an answer without a call ends the user's turn.
"""

import ast
import functools
import hashlib
import itertools
import json
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.config.envs import BfclOptions, EnvsSection
from common.formats.answers import tools_instruction
from envhub.digests import digests_of_packages
from envhub.env import (
    SPLITS,
    EnvFailure,
    EnvSpec,
    Isolation,
    StepResult,
    Style,
    SubsetSpec,
    parse_item,
)
from envhub.interop.texts import (
    BadAction,
    arguments_of,
    check_sendable,
    is_call,
    parse_json,
    shortened,
)
from envhub.interop.yaml_environments import optional_package

EXTRA = "bfcl"
PACKAGE = "bfcl_eval"
CHECKER = f"{PACKAGE}.eval_checker.multi_turn_eval"
SUBSETS = ("base", "miss_func", "miss_param", "long_context")
# Each scenario belongs to one split, in all subsets: they vary the same scenarios.
NUM_HELD_OUT = {"validation": 30, "test": 50}
SESSIONS_PER_WORKER = 32
CALLS = threading.Lock()  # The package keeps the objects of all episodes in one dictionary.
NUMBERS = itertools.count()
NEW_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
INSTRUCTION = """You help a user with tools. Fulfil each message of the user by calls of tools, one
in each answer, then answer without a call. If a tool or a value is missing, say so without a call.
"""
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One task of the package."""

    entry: Mapping[str, Any]
    answers: list[list[str]]  # Python calls of the reference solution, by the user's turns.


@functools.cache
def data_folder() -> Path:
    """Return the folder of the package's data, without an import of the package."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise EnvFailure(f"the Python package {PACKAGE} is missing")
    return Path(spec.submodule_search_locations[0]) / "data"


@functools.cache
def load_scenarios(subset: str) -> list[Scenario]:
    """Return the scenarios of a subset, by their number."""
    name = f"BFCL_v4_multi_turn_{subset}.json"
    entries = _lines(data_folder() / name)
    answers = {each["id"]: each["ground_truth"] for each in _lines(_answers_path(name))}
    return [Scenario(entry=entry, answers=answers[entry["id"]]) for entry in entries]


def _answers_path(name: str) -> Path:
    return data_folder() / "possible_answer" / name


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@functools.cache
def split_numbers() -> dict[str, list[int]]:
    """Return the scenarios' numbers of each split. Scenarios of equal first states stay together.

    The order is drawn once and for all, so a split is the same on every machine.
    """
    groups: dict[str, list[int]] = {}
    for number, scenario in enumerate(load_scenarios("base")):
        state = json.dumps(scenario.entry["initial_config"], sort_keys=True)
        groups.setdefault(state, []).append(number)
    order = list(groups.values())
    random.Random("bfcl").shuffle(order)
    numbers: dict[str, list[int]] = {split: [] for split in SPLITS}
    for group in order:
        split = next(
            (name for name, most in NUM_HELD_OUT.items() if len(numbers[name]) < most), "train"
        )
        numbers[split] += group
    return {split: sorted(each) for split, each in numbers.items()}


@functools.cache
def class_tools(class_name: str) -> list[dict[str, Any]]:
    """Return the tools of a simulated API as {"name", "description", "parameters"}."""
    config: Any = optional_package(f"{PACKAGE}.constants.executable_backend_config", EXTRA)
    name = config.MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    return [_as_tool(each) for each in _lines(data_folder() / "multi_turn_func_doc" / name)]


def _as_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's description with JSON schema's own names of types."""
    return {
        "name": function["name"],
        "description": function["description"],
        "parameters": _as_schema(function["parameters"]),
    }


def _as_schema(schema: Any) -> Any:
    """Return a schema whose Python types have their JSON names."""
    if isinstance(schema, list):
        return [_as_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _as_schema(value) for key, value in schema.items()}
    if isinstance(plain.get("type"), str):
        plain["type"] = JSON_TYPES.get(plain["type"], plain["type"])
    return plain


class BfclEnv:
    """One episode: the user's turns of a scenario, with calls of tools in each."""

    def __init__(self, options: BfclOptions) -> None:
        self._options = options
        self._is_done = True
        self._name = ""

    def reset(self, item_id: str, seed: int) -> str:
        """Return the first message of the user; `seed` is unused. Raises: UnknownItem."""
        item = parse_item(item_id, subsets_of(self._options))
        number = split_numbers()[item.split][item.index]
        self._scenario = load_scenarios(item.subset)[number]
        self._entry = self._scenario.entry
        self._turns: list[list[str]] = [[] for _ in self._entry["question"]]
        self._turn = 0
        self._num_calls = 0
        self._is_forced = False
        self._shown = ""
        self._is_done = False
        self._forget()
        # The package names its objects by the model. A new name gives this episode its own.
        self._name = f"episode{next(NUMBERS)}"
        missed = self._entry.get("missed_function", {})
        # BFCL does not use `excluded_function` of an entry either.
        classes = self._entry["involved_classes"]
        self._all_tools = [each for name in classes for each in class_tools(name)]
        self._hidden = {int(turn): {*names} for turn, names in missed.items()}
        self._execute([])
        self._first = self._question(0)
        self._shown = self._first
        return self._first

    def item_tools(self) -> list[dict[str, Any]]:
        """Return the tools of the scenario that the first turn offers."""
        later = {name for turn, names in self._hidden.items() if turn > 0 for name in names}
        return [each for each in self._all_tools if each["name"] not in later]

    def _offered(self) -> dict[str, dict[str, Any]]:
        """Return the tools that the current turn offers, by name."""
        later = {n for turn, names in self._hidden.items() if turn > self._turn for n in names}
        return {each["name"]: each for each in self._all_tools if each["name"] not in later}

    def _question(self, turn: int) -> str:
        """Return the user's message of a turn, with tools that are new in it."""
        text = "\n".join(message["content"] for message in self._entry["question"][turn])
        names = self._hidden.get(turn, set())
        if turn and names:
            new = [each for each in self._all_tools if each["name"] in names]
            return f"{tools_instruction(new)}\n{NEW_FUNCTIONS}"
        return text

    def step(self, action: str) -> StepResult:
        """Execute a call, or go on to the user's next turn. Raises: EnvFailure."""
        if self._is_done:
            raise RuntimeError("step before reset, or after the episode has ended")
        try:
            call = self._call_of(action)
        except BadAction as error:
            return self._counted(str(error), is_valid=False)
        if call is None:
            return self._next_turn()
        self._turns[self._turn].append(call)
        (result,) = self._execute([call])
        return self._counted(shortened(result, self._options.result_chars), is_valid=True)

    def _counted(self, text: str, *, is_valid: bool) -> StepResult:
        """Return the answer to a call; too many calls in a turn end the episode, as in BFCL."""
        self._num_calls += 1
        if self._num_calls > self._options.max_calls:
            self._is_forced = True
            return self._end(is_valid=is_valid)
        self._shown = text or "None"
        return StepResult(observation=self._shown, reward=0.0, done=False, is_valid=is_valid)

    def _next_turn(self) -> StepResult:
        """Go on to the user's next message, or end the episode with the checker's score."""
        self._turn += 1
        self._num_calls = 0
        if self._turn == len(self._turns):
            return self._end(is_valid=True)
        self._shown = self._question(self._turn)
        return StepResult(observation=self._shown, reward=0.0, done=False, is_valid=True)

    def _end(self, *, is_valid: bool) -> StepResult:
        """Return the end of the episode with the score of the package's checker."""
        self._is_done = True
        num_right = self._num_right()
        is_right = num_right == len(self._turns) and not self._is_forced
        share = num_right / len(self._turns)
        self._forget()
        self._shown = "The conversation has ended."
        return StepResult(
            observation=self._shown,
            reward=float(is_right) if self._options.reward == "passed" else share,
            done=True,
            is_valid=is_valid,
            is_success=is_right,
            metrics={"bfcl_turns_right": share},
        )

    def _num_right(self) -> int:
        """Return the number of turns, from the first one, that BFCL's checker accepts.

        The rule is that of BFCL's evaluation: a needless call is wrong only if it changes a state
        that is checked, also in a turn that lacks a tool or a value.
        """
        checker: Any = optional_package(f"{CHECKER}.multi_turn_checker", EXTRA)
        made = [[[call] for call in calls] for calls in self._turns]
        last = min(self._turn, len(made))
        answers = self._scenario.answers
        with CALLS:
            for number in range(1, last + 1):
                name = f"{self._name}check{number}"
                verdict = checker.multi_turn_checker(
                    multi_turn_model_result_list_decoded=made[:number],
                    multi_turn_ground_truth_list=answers[:number],
                    test_entry={**self._entry},
                    test_category=self._entry["id"].rsplit("_", 1)[0],
                    model_name=name,
                )
                _forget_objects(name)
                if not verdict["valid"]:
                    return number - 1
        return last

    def _call_of(self, action: str) -> str | None:
        """Return a call as Python text made of literals; None: the action calls nothing.

        Raises: BadAction: an empty action, or a call of an unknown tool or with arguments that it
            does not have.
        """
        if not action.strip():
            raise BadAction("The answer has no call and no text.")
        if not is_call(action):
            return None
        call = parse_json(action)
        name = call.get("tool") or call.get("name")
        offered = self._offered()
        if not isinstance(name, str) or name not in offered:
            raise BadAction(f"No tool {name!r:.100}; there are: {', '.join(offered)}.")
        arguments = arguments_of(call)
        check_sendable(arguments)
        return as_python(name, arguments, offered[name]["parameters"])

    def _execute(self, calls: list[str]) -> list[str]:
        """Return the results of calls on the simulated APIs."""
        executor: Any = optional_package(f"{CHECKER}.multi_turn_utils", EXTRA)
        with CALLS:
            results, _ = executor.execute_multi_turn_func_call(
                calls,
                self._entry["initial_config"],
                self._entry["involved_classes"],
                self._name,
                self._entry["id"],
                long_context="long_context" in self._entry["id"],
            )
        return [str(each) for each in results]

    def valid_actions(self) -> list[str]:
        """Return calls of the reference solution, and an answer without a call."""
        if self._is_done:
            return []
        later = self._expert_calls()
        return [*dict.fromkeys([*later, "Done."])]

    def _expert_calls(self) -> list[str]:
        """Return the reference calls of the current turn as actions."""
        answers = self._scenario.answers[self._turn]
        return [as_action(each, self._offered()) for each in answers]

    def expert_action(self) -> str | None:
        """Return the reference solution's next call, or the end of the user's turn."""
        if self._is_done:
            return None
        calls = self._expert_calls()
        return calls[self._num_calls] if self._num_calls < len(calls) else "Done."

    def render(self) -> str:
        """Return the last observation."""
        return self._shown

    def fingerprint(self) -> str:
        """Return the hash of the scenario."""
        state = json.dumps([self._entry["id"], self._entry["question"]])
        return hashlib.sha256(state.encode()).hexdigest()

    def close(self) -> None:
        """Release the simulated APIs of the episode."""
        self._forget()

    def _forget(self) -> None:
        if self._name:
            with CALLS:
                _forget_objects(self._name)


def _forget_objects(name: str) -> None:
    """Remove the objects that the package keeps under a name of a model; the caller has CALLS."""
    objects = vars(optional_package(f"{CHECKER}.multi_turn_utils", EXTRA))
    for key in [key for key in objects if key.startswith(f"{name}_")]:
        del objects[key]


def as_python(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return a call as Python text. Its values are literals, so nothing else is evaluated.

    Raises: BadAction: an argument that the tool does not have.
    """
    properties = schema.get("properties", {})
    for argument in arguments:
        if argument not in properties or not argument.isidentifier():
            names = ", ".join(properties)
            raise BadAction(f"{name} has no argument {argument!r:.100}; it has {names}.")
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def as_action(call: str, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a call of the reference solution as an action."""
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    name = node.func.id
    names = [*tools.get(name, {}).get("parameters", {}).get("properties", {})]
    values = [ast.literal_eval(each) for each in node.args]
    arguments = dict(zip(names, values, strict=False))
    arguments |= {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    return json.dumps({"tool": name, "arguments": arguments}, ensure_ascii=False)


def subsets_of(options: BfclOptions) -> dict[str, SubsetSpec]:
    """Return the categories of BFCL as subsets with the same scenarios in each split."""
    numbers = {split: len(each) for split, each in split_numbers().items()}
    most = max(len(each.entry["question"]) for each in load_scenarios("miss_func"))
    spec = SubsetSpec(
        num_train=numbers["train"],
        num_validation=numbers["validation"],
        num_test=numbers["test"],
        max_turns=most * (options.max_calls + 1),
    )
    return dict.fromkeys(SUBSETS, spec)


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the catalogue entry."""
    section = options.bfcl

    def make(_: Style) -> BfclEnv:
        return BfclEnv(section)

    return EnvSpec(
        name="bfcl",
        subsets=subsets_of(section),
        instruction=dict.fromkeys(Style, INSTRUCTION),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=SESSIONS_PER_WORKER,
        max_workers=section.max_workers,
        sessions_key="envs.bfcl.max_workers",
        takes_any_text=True,
        has_references=True,
        content=digests_of_packages("bfcl-eval"),
    )
