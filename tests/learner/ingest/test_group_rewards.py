"""Laws of rewards over a group: real functions in their processes, the log, and the batch."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoTokenizer

from common.config.algorithm import AlgorithmSection
from common.config.groups import GroupsSection
from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvFailure, LongstrideError
from common.formats.chat_template import render_chat
from common.functions.process import pack
from common.repository import ROOT
from common.user_code import changed_functions
from common.wire.codec import decode, encode
from common.wire.messages import EndReason, GroupArrived, Trajectory
from learner.ingest.buffer import GroupAssembly
from learner.ingest.group_rewards import (
    GroupRewarder,
    MemberTexts,
    _example_member,
    check_group_rewards,
    group_reward_digests,
    load_group_rewards,
    offered_keywords,
    with_item_facts,
)
from learner.objective.advantages import group_has_signal, samples_of
from learner.recovery.resume import groups_of
from learner.recovery.reward_log import GroupReward, RewardLog, read_group_rewards, rewarded
from learner.recovery.step_log import LoggedStep
from tests.learner.builders import make_trajectory
from tests.learner.ingest.intake_rig import Setup, member

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny-arithmetic")
FUNCTIONS = """
import asyncio
import os
import time


def rank(group):
    order = sorted(m["member"] for m in group)
    return [order.index(m["member"]) / (len(order) - 1) for m in group]


async def waits(group, rewards):
    await asyncio.sleep(0.01)
    return rewards


def of_trl(prompts, completions, completion_ids, unit, log_metric, **kwargs):
    log_metric("seen", len(prompts))
    assert prompts == ["How many?"] * len(prompts), prompts
    return [1.0 if text.endswith(right) else None for text, right in zip(completions, unit)]


async def of_verifiers(states, completions, prompts, answers, infos, tasks):
    assert [s["completion"] for s in states] == completions
    assert all(s["completion"][-1]["role"] == "assistant" for s in states)
    return [float(c[-1]["content"] == a) for c, a in zip(completions, answers)]


def fewest_turns(states):
    turns = [len(state.get("trajectory", [])) for state in states]
    assert turns == [state["turn"] for state in states]
    assert all(s["trajectory"][-1]["completion"][-1] == s["completion"][-1] for s in states)
    return [min(turns) / each for each in turns]


def fails(group):
    raise ZeroDivisionError("no pair")


def is_short(group):
    return [1.0] * (len(group) - 1)


def is_nan(group):
    return [float("nan")] * len(group)


def is_text(group):
    return ["good"] * len(group)


def is_large(group):
    return [7.0] * len(group)


def hangs(group):
    time.sleep(60)


def dies(group):
    os._exit(3)


def is_even_once(group):
    path = os.environ["CALLS"]
    with open(path, "a") as calls:
        calls.write(group[0]["item_id"] + "\\n")
    return [m["member"] % 2 for m in group]


def single(completion):
    return 1.0


async def lazy(group, unit):
    import no_such_package

    return [no_such_package.score(each) for each in unit]
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "compare.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


def answered(
    number: int, text: str = "7", *, facts: dict[str, Any] | None = None, group_id: str = "g0000001"
) -> Trajectory:
    """Return a finished episode that answers with a text; its reward is that of `member`."""
    prompt = TOKENIZER.encode("How many?", add_special_tokens=False)
    answer = TOKENIZER.encode(text, add_special_tokens=False)
    mask = [0] * len(prompt) + [1] * len(answer)
    trajectory = make_trajectory(prompt + answer, mask, group_id=group_id, member=number)
    return replace(
        trajectory,
        reward=float(number == 0),
        turn_scores=np.array([float(number == 0)], np.float32),
        facts="" if facts is None else json.dumps(pack(facts)),
    )


def of_dataset(number: int, text: str) -> Trajectory:
    """Return an episode of the dataset with a text prompt and the column `unit`."""
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": text}]
    facts = {
        "messages": messages,
        "num_asked": 1,
        "completion": text,
        "prompts": "How many?",
        "completions": text,
        "columns": {"unit": "km", "answer": "7 km"},
        "record": {"unit": "km"},
    }
    return answered(number, text, facts=facts)


class Calls:
    """A rewarder of `groups.reward` and its log."""

    def __init__(self, root: Path, reward: Any, **keys: Any) -> None:
        cfg = GroupsSection(size=3, per_step=1, min_size=2, reward=reward, **keys)
        rewards = load_group_rewards(cfg)
        assert rewards is not None
        self.log = RewardLog(root / "group_rewards.jsonl")
        self.rewarder = GroupRewarder(rewards, self.log, MemberTexts(TOKENIZER))
        self.rewarder.start()

    def reward(self, *members: Trajectory) -> GroupReward:
        return self.rewarder.begin(members).result(timeout=60)


@pytest.fixture
def calls(tmp_path: Path, functions: Path) -> Iterator[Any]:
    made: list[Calls] = []

    def make(name: str, *, entry: dict[str, Any] | None = None, **keys: Any) -> Calls:
        reference = f"{functions}:{name}"
        reward = reference if entry is None else {name: {"function": reference, **entry}}
        made.append(Calls(tmp_path, reward, **keys))
        return made[-1]

    yield make
    for each in made:
        each.rewarder.stop()


@pytest.mark.slow
def test_ranks_of_finished_members_replace_their_rewards(calls: Any) -> None:
    reward = calls("rank", environment_weight=0.0).reward(*map(answered, (0, 1, 3)))
    assert reward.rewards == {0: 0.0, 1: 0.5, 3: 1.0}  # The failed member 2 is absent.
    assert reward.values == {"rank": [0.0, 0.5, 1.0]}
    trained = reward.applied(answered(1))
    assert (trained.reward, trained.turn_scores.tolist()) == (0.5, [0.5])


@pytest.mark.slow
def test_sum_with_the_environments_reward_is_mapped_to_its_range(calls: Any) -> None:
    reward = calls("rank", entry={"weight": -1.0}).reward(*map(answered, (0, 1, 2)))
    # The environment pays 1, 0, 0; the penalty is 0, 0.5, 1. The sum lies in [-1, 1].
    assert reward.rewards == {0: 1.0, 1: 0.25, 2: 0.0}
    start = reward.applied(replace(answered(1), start_score=0.0))
    assert start.start_score == 0.5  # A sum of 0, mapped.


@pytest.mark.slow
def test_asynchronous_function_receives_the_rewards_so_far(calls: Any) -> None:
    assert calls("waits", environment_weight=0.0).reward(answered(1), answered(0)).rewards == {
        1: 0.0,
        0: 1.0,
    }


@pytest.mark.slow
def test_function_of_trl_receives_columns_and_texts(calls: Any) -> None:
    made = calls("of_trl", environment_weight=1.0)
    reward = made.reward(of_dataset(1, "7 km"), of_dataset(2, "7 m"))
    assert reward.values == {"of_trl": [1.0, None]}
    assert reward.rewards == {1: 0.5, 2: 0.0}  # None counts as 0.


@pytest.mark.slow
def test_member_that_ended_at_a_limit_has_the_columns_of_its_item(calls: Any) -> None:
    made = calls("of_trl", environment_weight=0.0)
    reward = made.reward(answered(0, "7 km"), of_dataset(1, "8 km"))
    assert (reward.error, reward.values) == ("", {"of_trl": [1.0, 1.0]})


def test_column_that_is_no_part_of_the_item_is_not_taken_from_another_member() -> None:
    texts = MemberTexts(TOKENIZER)
    whole = texts.member(of_dataset(1, "8 km"))
    columns = {**whole["columns"], "solution_str": "8 km"}
    first, _ = with_item_facts([texts.member(answered(0, "7 km")), {**whole, "columns": columns}])
    assert first["columns"] == {"unit": "km", "answer": "7 km", "solution_str": "7 km"}
    columns["score"] = 0.5
    with pytest.raises(EnvFailure, match="member 0 ended without the column 'score' of the others"):
        with_item_facts([texts.member(answered(0, "7 km")), {**whole, "columns": columns}])


@pytest.mark.slow
def test_missing_package_of_a_call_is_named_before_the_start(functions: Path) -> None:
    cfg = GroupsSection(size=3, min_size=2, reward={"judged": f"{functions}:lazy"})
    part = r"groups.reward.judged=.*:lazy: a call with an example fails: .*'no_such_package'"
    with pytest.raises(ConfigError, match=part):
        check_group_rewards(cfg)
    for name in ("fails", "is_short", "dies", "of_trl"):  # The run has the episodes that decide.
        check_group_rewards(GroupsSection(size=3, min_size=2, reward=f"{functions}:{name}"))


def test_example_of_a_member_has_the_facts_of_an_episode() -> None:
    example = _example_member(0, 3)
    assert example.keys() == MemberTexts(TOKENIZER).member(answered(0)).keys()
    assert example["episode_id"] == "example/0"  # No episode of a run has this name.


@pytest.mark.slow
def test_function_of_the_package_trl_loads_as_it_is(tmp_path: Path) -> None:
    def chat(number: int, text: str) -> Trajectory:
        """Return an episode of the dataset with messages as its prompt."""
        asked = {"role": "user", "content": "How many?"}
        answer = {"role": "assistant", "content": text}
        facts = {
            **{"messages": [asked, answer], "num_asked": 1, "completion": text},
            **{"prompts": [asked], "completions": [answer], "columns": {}, "record": {}},
        }
        return answered(number, text, facts=facts)

    made = Calls(tmp_path, "trl.rewards:think_format_reward", environment_weight=0.0)
    try:
        reward = made.reward(chat(0, "<think>3 + 4</think>7"), chat(1, "7"))
    finally:
        made.rewarder.stop()
    assert (reward.error, reward.rewards) == ("", {0: 1.0, 1: 0.0})


@pytest.mark.slow
def test_function_of_verifiers_receives_states_and_messages(calls: Any) -> None:
    made = calls("of_verifiers", environment_weight=0.0)
    assert made.reward(of_dataset(0, "7 km"), of_dataset(1, "7")).rewards == {0: 1.0, 1: 0.0}


@pytest.mark.slow
def test_state_of_verifiers_has_a_step_for_each_answer(calls: Any) -> None:
    made = calls("fewest_turns", environment_weight=0.0)
    answer = {"role": "assistant", "content": "7 km"}
    asked = {"role": "user", "content": "How many?"}
    twice = {"messages": [asked, answer, asked, answer], "num_asked": 1, "completion": "7 km"}
    reward = made.reward(of_dataset(0, "7 km"), answered(1, "7 km", facts=twice))
    assert (reward.error, reward.rewards) == ("", {0: 1.0, 1: 0.5})


def test_task_and_info_of_a_record_are_those_of_verifiers() -> None:
    member = MemberTexts(TOKENIZER).member(of_dataset(0, "7 km"))
    columns = {**member["columns"], "task": "units", "info": '{"level": 2}'}
    offered = offered_keywords([{**member, "columns": columns}, member], has_texts=False)
    assert offered["tasks"] == ["units", "toy/toy"]
    assert offered["infos"] == [{"level": 2}, {}]
    assert [state["task"] for state in offered["states"]] == offered["tasks"]
    plain = offered_keywords([{**member, "columns": {"info": "a note"}}], has_texts=False)
    assert plain["infos"] == ["a note"]


@pytest.mark.slow
def test_episode_without_facts_has_messages_from_its_tokens(calls: Any) -> None:
    made = calls("of_verifiers", environment_weight=0.0)
    # Without a record the reference answer is "".
    assert made.reward(answered(0, "7"), answered(1, "8")).rewards == {0: 0.0, 1: 0.0}
    texts = MemberTexts(TOKENIZER).member(answered(1, "8"))
    assert texts["messages"][-1] == {"role": "assistant", "content": "8"}
    assert texts["completion"] == "8"


def test_messages_of_several_turns_lose_the_marks_of_the_template() -> None:
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "8"},
    ]

    def ids(num: int) -> list[int]:
        text = render_chat(TOKENIZER, messages[:num])
        return TOKENIZER.encode(text, add_special_tokens=False)

    prompt = ids(1)
    first = TOKENIZER.encode("7", add_special_tokens=False)
    seen = ids(3)[len(prompt) + len(first) :]
    last = TOKENIZER.encode("8", add_special_tokens=False)
    assert ids(3) == [*prompt, *first, *seen]  # The template keeps earlier turns.
    mask = [0] * len(prompt) + [1] * len(first) + [0] * len(seen) + [1] * len(last)
    trajectory = make_trajectory([*prompt, *first, *seen, *last], mask)
    assert MemberTexts(TOKENIZER).messages(trajectory) == (messages, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fails", "ZeroDivisionError: no pair (compare.py, line "),
        ("is_short", "returned 1 numbers for a group of 2 finished members"),
        ("is_nan", "returned nan for member 0, which is not finite"),
        ("is_text", "returned 'good' for member 0, which is not a number"),
        ("is_large", "outside of [0, 1]"),
        ("hangs", "no answer within 0.5 s"),
        ("dies", "closed its connection"),
    ],
)
def test_failed_function_is_an_error_and_no_reward(calls: Any, name: str, text: str) -> None:
    made = calls(name, entry={"timeout_s": 0.5})
    reward = made.reward(answered(0), answered(1))
    assert text in reward.error
    assert f"groups.reward.{name}=" in reward.error
    assert reward.rewards == {}
    assert made.rewarder.drain_metrics()["group_rewards/failed"] == 1.0


@pytest.mark.slow
def test_functions_are_called_once_for_each_group_also_after_a_restart(
    tmp_path: Path, functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    members = [answered(0), answered(1)]
    rewards = []
    for _ in range(2):  # Two lives of a learner.
        made = Calls(tmp_path, f"{functions}:is_even_once", environment_weight=0.0)
        rewards.append(made.reward(*members))
        made.rewarder.stop()
    assert rewards[0] == rewards[1]
    assert rewards[0].rewards == {0: 0.0, 1: 1.0}
    assert len((tmp_path / "calls").read_text(encoding="utf-8").splitlines()) == 1


def table_of(**keys: Any) -> GroupAssembly:
    algorithm = AlgorithmSection()
    return GroupAssembly(
        GroupsSection(size=3, per_step=1, min_size=2, **keys),
        algorithm,
        has_signal=lambda m: group_has_signal(m, algorithm),
        is_compared=True,
    )


def lost(number: int) -> Trajectory:
    return replace(member(number, group_id="g0000001"), end_reason=EndReason.ENV_ERROR)


def test_group_is_complete_only_with_its_rewards() -> None:
    table = table_of()
    for number in range(2):
        assert table.add(answered(number)) == ([], [])
    outcomes, arrived = table.add(lost(2))
    assert [o.episode_id for o in outcomes] == ["g0000001/2"]
    assert (arrived, table.num_unrewarded, table.num_ready) == ([], 1, 0)
    (group,) = table.take_unrewarded()
    assert [t.member for t in group.members] == [0, 1]  # A failed member is absent.
    reward = GroupReward(group_id="g0000001", rewards={0: 0.25, 1: 0.75})
    arrived = [GroupArrived(group_id="g0000001", is_ready=True)]
    assert table.add_rewards(reward) == ([], arrived)
    groups, _ = table.take(0, max_lag_steps=4, in_order=False)
    assert [t.reward for t in groups[0].members] == [0.25, 0.75]


def test_rewards_over_the_group_decide_its_signal() -> None:
    table = table_of()
    for number in range(3):
        table.add(answered(number))
    equal = GroupReward(group_id="g0000001", rewards={0: 0.5, 1: 0.5, 2: 0.5})
    outcomes, arrived = table.add_rewards(equal)
    assert {(o.outcome.value, o.cause) for o in outcomes} == {("filtered", "zero_variance")}
    assert arrived == [GroupArrived(group_id="g0000001", is_ready=False)]


def test_failed_function_fails_the_members_with_its_error() -> None:
    table = table_of()
    for number in range(3):
        table.add(answered(number))
    outcomes, arrived = table.add_rewards(GroupReward(group_id="g0000001", error="no pair"))
    found = {(o.outcome.value, o.cause, o.error) for o in outcomes}
    assert found == {("failed", "group_reward", "no pair")}
    assert len(outcomes) == 3
    assert arrived == [GroupArrived(group_id="g0000001", is_ready=False)]
    assert table.num_ready == 0


@pytest.mark.slow
def test_batch_from_an_actors_socket_has_the_logged_rewards(
    tmp_path: Path, functions: Path
) -> None:
    made = Calls(tmp_path / "log", f"{functions}:rank", environment_weight=0.0)
    setup = Setup(tmp_path, compare=made.rewarder.begin)
    setup.intake.start()
    try:
        for number in range(3):
            setup.deliver(member(number, group_id="g0000001"))
        setup.scheduler.pump_until(lambda: setup.scheduler.groups.get("g0000001") is True)
        (group,), _ = setup.next_batch()
    finally:
        setup.close()
        made.rewarder.stop()
    assert [t.reward for t in group.members] == [0.0, 0.5, 1.0]
    # A repeated step and a recomputation have the same samples from journal and log.
    plain = {t.episode_id: t for t in map(lambda n: member(n, group_id="g0000001"), range(3))}
    step = LoggedStep(version=1, groups=[[t.episode_id for t in group.members]], outcomes=[])
    logged = read_group_rewards(tmp_path / "log" / "group_rewards.jsonl")
    (repeated,) = groups_of(step, plain, logged)
    samples = [samples_of([each], setup.algorithm) for each in (group, repeated)]
    advantages = [[sample.advantage for sample in each] for each in samples]
    assert advantages[0] == advantages[1]
    assert advantages[0][0] < 0 < advantages[0][2]


def test_log_without_a_member_of_a_trained_group_is_refused() -> None:
    rewards = {"g0000001": GroupReward(group_id="g0000001", rewards={0: 1.0})}
    assert rewarded(answered(0), rewards).reward == 1.0
    with pytest.raises(LongstrideError, match=r"no reward of member 1 in journal/group_rewards"):
        rewarded(answered(1), rewards)


def test_torn_line_of_the_log_is_left_out_and_a_damaged_one_named(tmp_path: Path) -> None:
    path = tmp_path / "group_rewards.jsonl"
    log = RewardLog(path)
    log.append(GroupReward(group_id="g0000001", rewards={0: 1.0}, values={"f": [1.0]}))
    log.append(GroupReward(group_id="g0000002", error="no pair"))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"group":"g00')
    assert [*read_group_rewards(path)] == ["g0000001", "g0000002"]
    log = RewardLog(path)
    log.close()
    assert path.read_bytes() == whole
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(ConfigError, match=r"line 1 is damaged"):
        read_group_rewards(path)


def test_pruned_log_keeps_the_groups_of_the_steps_and_open_groups(tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    steps.write_text('{"version":1,"groups":[["g0000002/0"]],"outcomes":[]}\n', encoding="utf-8")
    log = RewardLog(tmp_path / "group_rewards.jsonl", prune_from_bytes=1)
    for number in (1, 2, 9):
        log.append(GroupReward(group_id=f"g000000{number}", rewards={0: 0.5}))
    log.prune(steps, closed_below=9)
    log.append(GroupReward(group_id="g0000010", rewards={0: 0.5}))
    log.close()
    found = read_group_rewards(tmp_path / "group_rewards.jsonl")
    assert [*found] == ["g0000002", "g0000009", "g0000010"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "text"),
    [
        ("compare.py:single", "the function takes no group; its parameters are completion"),
        ("compare.py:missing", "has no function 'missing'"),
        ("rank", "expects module:function"),
        ({"a": {"function": "compare.py:rank", "wait": 1}}, "groups.reward.a.wait=1: no such key"),
        ({"a": {"function": "compare.py:rank", "min": 1}}, "groups.reward.a.min=1: must be <"),
        ({"a": {"function": "compare.py:rank", "weight": 0}}, "the weight of every function is 0"),
        ({"a b": "compare.py:rank"}, "the name must consist of letters"),
        ([1], "expects module:function, file.py:function, or a map"),
    ],
)
def test_wrong_configuration_is_named(functions: Path, reward: Any, text: str) -> None:
    def placed(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("compare.py", str(functions))
        return {k: placed(v) for k, v in value.items()} if isinstance(value, dict) else value

    with pytest.raises(ConfigError, match=r"groups\.reward") as error:
        load_group_rewards(GroupsSection(reward=placed(reward)))
    assert text in str(error.value)


def test_changed_file_of_a_function_is_named_at_a_resume(functions: Path) -> None:
    cfg = GroupsSection(reward={"order": f"{functions}:rank"})
    before = group_reward_digests(cfg)
    assert changed_functions(before, group_reward_digests(cfg)) == []
    functions.write_text(f"{FUNCTIONS}# Another version.\n", encoding="utf-8")
    (line,) = changed_functions(before, group_reward_digests(cfg))
    start = f"groups.reward.order={functions}:rank: its file has changed: sha256 was "
    assert line.startswith(start)


def test_group_of_one_member_has_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match=r"groups\.reward.*needs groups\.size >= 2"):
        RunConfig(groups=GroupsSection(size=1, min_size=1, reward="compare.py:rank"))


def test_facts_travel_with_the_trajectory() -> None:
    trajectory = of_dataset(1, "7 km")
    copy = decode(encode(trajectory))
    assert copy.facts == trajectory.facts
    assert MemberTexts(TOKENIZER).member(copy)["record"] == {"unit": "km"}


@pytest.mark.slow
def test_formula_of_the_reward_is_that_of_the_numbers(calls: Any, functions: Path) -> None:
    entry = {"function": f"{functions}:rank", "weight": -0.5, "min": -1, "max": 1}
    rewards = load_group_rewards(GroupsSection(reward={"rank": entry}))
    assert rewards is not None
    assert rewards.formula == "R=(1*environment -0.5*rank(compare.py:rank in [-1, 1]) + 0.5) / 2"
    made = calls("rank", entry={"weight": -0.5, "min": -1, "max": 1})
    # The environment pays 1 and 0, the function 0 and 1.
    assert made.reward(answered(0), answered(1)).rewards == {0: 0.75, 1: 0.0}


EXAMPLES = ROOT / "docs/examples/dataset/groups.py"


def with_length(number: int, length: int, *, is_success: bool) -> Trajectory:
    trajectory = answered(number, "7 " * length)
    return replace(trajectory, is_success=is_success, reward=float(is_success))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("shortest_right", [0.5, 1.0, 0.0]),
        ("diversity", [1.0, 1.0, 1.0]),
        ("wins", [0.5, 0.5, 0.0]),
    ],
)
def test_examples_of_the_documentation_rank_a_group(
    tmp_path: Path, name: str, numbers: list[float]
) -> None:
    made = Calls(tmp_path, f"{EXAMPLES}:{name}", environment_weight=0.0)
    group = [
        with_length(0, 4, is_success=True),
        with_length(1, 2, is_success=True),
        with_length(2, 1, is_success=False),
    ]
    assert made.reward(*group).values == {name: numbers}
    made.rewarder.stop()


class Judge(BaseHTTPRequestHandler):
    """An endpoint whose model gives each answer of a request a higher score than the last one."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        num = body["messages"][1]["content"].count("<answer ")
        scores = [10 * index / (num - 1) for index in range(num)]
        text = f"Compared. {json.dumps({'scores': scores})}"
        reply = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.mark.slow
def test_judge_of_the_documentation_scores_all_answers_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("JUDGE_MODEL", "m")
        made = Calls(tmp_path, f"{EXAMPLES}:judged", environment_weight=0.0)
        rewards = [made.reward(*map(answered, (0, 1, 2))).rewards]
        made.rewarder.stop()
        server.shutdown()
    assert rewards == [{0: 0.0, 1: 0.5, 2: 1.0}]
    assert len(Judge.asked) == 1
