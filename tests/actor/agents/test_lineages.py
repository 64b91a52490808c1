"""Laws of an agent's conversations: every sampled token is in the loss once, in one row."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from actor.agents.lineages import Lineages
from actor.rollout.context import Turn
from actor.rollout.episode import EnvSession, OnTokens, trajectory_of
from common.config.load import load_config
from common.errors import ConfigError
from common.segments import as_rows, prefixes_of, segments_of
from common.wire.codec import decode, encode
from common.wire.messages import Trajectory
from learner.ingest.intake import refusal
from tests.actor.agents.endpoint import RENDERER, ByHeart, Endpoint, endpoint
from tests.actor.agents.test_tool_calls import LOOK, TOKENIZER, TOOL
from tests.actor.rollout.playing import LEASE, Count, go_on

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Which way?"}
LONG = replace(LEASE, horizon=50, deadline_s=120.0)


@dataclass(slots=True)
class Recorded(ByHeart):
    """A policy that keeps its own record of what it has sampled, with unique logprobs."""

    sampled: list[tuple[list[int], Turn]] = field(default_factory=list[tuple[list[int], Turn]])
    barrier: asyncio.Barrier | None = None  # Answers are sampled once so many requests wait.

    async def act(
        self, ids: list[int], session: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Turn:
        if self.barrier is not None:
            await self.barrier.wait()
        return await ByHeart.act(self, ids, session, on_tokens)

    def turn(self, ids: list[int]) -> Turn:
        turn = ByHeart.turn(self, ids)
        number = len(self.sampled)
        turn.logprobs[:] = [-number - i / 1024 for i in range(len(turn.token_ids))]
        self.sampled.append((list(ids), turn))
        return turn


def trained(trajectory: Trajectory) -> Counter[tuple[tuple[int, ...], int, float]]:
    """Return how often each sampled token is in the loss, with the tokens before it."""
    counts: Counter[tuple[tuple[int, ...], int, float]] = Counter()
    for row in as_rows(trajectory):
        for at in np.flatnonzero(row.loss_mask).tolist():
            before = tuple(row.token_ids[:at].tolist())
            counts[before, int(row.token_ids[at]), round(float(row.logprobs[at]), 4)] += 1
    return counts


def of_engine(sampled: list[tuple[list[int], Turn]]) -> Counter[tuple[tuple[int, ...], int, float]]:
    """Return the same of the engine's own record."""
    counts: Counter[tuple[tuple[int, ...], int, float]] = Counter()
    for ids, turn in sampled:
        for at, (token, logprob) in enumerate(zip(turn.token_ids, turn.logprobs, strict=True)):
            before = (*ids, *turn.token_ids[:at])
            counts[before, token, round(float(np.float32(logprob)), 4)] += 1
    return counts


def captured(
    policy: Recorded, ask: Callable[[Endpoint], Awaitable[None]], **how: Any
) -> Trajectory:
    """Return the episode of an agent, whose tokens obey the laws."""

    async def run() -> Trajectory:
        async with endpoint(policy, lease=LONG, **how) as at:
            await ask(at)
            at.episode.leave()
            return trajectory_of(LONG, at.play, actor="actor-0", wall_s=0.0)

    trajectory = asyncio.run(run())
    assert trained(trajectory) == of_engine(policy.sampled)
    assert set(trained(trajectory).values()) == {1}
    why = refusal(trajectory, learner_version=4, max_group_size=2, vocab_size=len(TOKENIZER))
    assert why == ""
    return trajectory


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(at: Endpoint, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    status, answer = await at.post(CHAT, {"messages": messages, **more})
    assert status == 200, answer
    return answer["choices"][0]["message"]


def test_switching_between_two_conversations_makes_two_rows() -> None:
    async def law(at: Endpoint) -> None:
        main, sub = [user("main")], [user("a sub-agent")]
        for number in range(3):
            for history in (main, sub):
                history += [await ask(at, history), user(f"go on {number}")]

    trajectory = captured(Recorded(["a", "b", "c", "d", "e", "f"]), law)
    texts = [TOKENIZER.decode(row.token_ids) for row in as_rows(trajectory)]
    assert [text.count("assistant") for text in texts] == [3, 3]
    assert "main" in texts[0]
    assert "a sub-agent" in texts[1]


def test_two_continuations_share_the_stored_beginning() -> None:
    policy = Recorded(["go", "b", "c"])

    async def law(at: Endpoint) -> None:
        answer = await ask(at, [user("long " * 50)])
        for text in ("left", "right"):
            await ask(at, [user("long " * 50), answer, user(text)])

    trajectory = captured(policy, law)
    first, second = as_rows(trajectory)
    assert prefixes_of(trajectory)[1][0] == 0
    num_shared = prefixes_of(trajectory)[1][1]
    assert num_shared > 50
    assert len(trajectory.token_ids) == len(first.token_ids) + len(second.token_ids) - num_shared
    num_answer = len(policy.sampled[0][1].token_ids)
    assert int(first.loss_mask.sum()) == num_answer + len(policy.sampled[1][1].token_ids)
    assert int(second.loss_mask.sum()) == len(policy.sampled[2][1].token_ids)
    assert second.token_ids.tolist()[:num_shared] == first.token_ids.tolist()[:num_shared]


def test_requests_of_one_episode_are_sampled_at_once() -> None:
    async def law(at: Endpoint) -> None:
        async with asyncio.timeout(60):
            asking = [ask(at, [user(f"task {number}")]) for number in range(8)]
            assert len({each["content"] for each in await asyncio.gather(*asking)}) == 8

    trajectory = captured(Recorded([*"abcdefgh"], barrier=asyncio.Barrier(8)), law)
    assert len(as_rows(trajectory)) == 8


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_n_answers_are_rows_with_one_prompt(path: str) -> None:
    asked = {"prompt": "go"} if path == COMPLETIONS else {"messages": [USER]}

    async def law(at: Endpoint) -> None:
        status, answer = await at.post(path, {**asked, "n": 3, "logprobs": path == CHAT or 0})
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        entries = [choice["logprobs"] for choice in answer["choices"]]
        num = [len(each.get("content") or each.get("tokens")) for each in entries]
        assert sum(num) == answer["usage"]["completion_tokens"]

    trajectory = captured(Recorded(["a b", "c", "d"]), law)
    assert [num > 0 for _, num in prefixes_of(trajectory)] == [False, True, True]
    assert [row.num_turns for row in as_rows(trajectory)] == [1, 1, 1]


def test_rewritten_history_begins_at_the_first_different_token() -> None:
    """A shortened tool result; the answers after it are those of the agent's text."""
    policy = Recorded([LOOK, LOOK, "done", "again"])
    result = {"role": "tool", "content": "a long page of text"}

    async def law(at: Endpoint) -> None:
        history: list[dict[str, Any]] = [USER]
        for _ in range(2):
            answer = await ask(at, history, tools=[TOOL])
            named = {**result, "tool_call_id": answer["tool_calls"][0]["id"]}
            history = [*history, answer, named]
        await ask(at, history, tools=[TOOL])
        history[2] = {**history[2], "content": "a long"}
        await ask(at, history, tools=[TOOL])

    trajectory = captured(policy, law)
    first, second = as_rows(trajectory)
    num_shared = prefixes_of(trajectory)[1][1]
    assert first.token_ids[num_shared] != second.token_ids[num_shared]
    shared = f"{TOKENIZER.decode(second.token_ids[:num_shared])}"
    assert shared.count("<tool_call>") == 2  # The template's own, and the first answer.
    assert shared.endswith("a long")
    assert int(second.loss_mask.sum()) == len(policy.sampled[3][1].token_ids)


def test_other_system_prompt_or_tools_begin_a_new_row() -> None:
    async def law(at: Endpoint) -> None:
        for system, tools in (("Be brief.", [TOOL]), ("Be kind.", [TOOL]), ("Be kind.", [])):
            await ask(at, [{"role": "system", "content": system}, USER], tools=tools)

    trajectory = captured(Recorded(["a", "b", "c"]), law)
    assert len(as_rows(trajectory)) == 3


def test_step_during_an_answer_is_not_delayed() -> None:
    barrier = asyncio.Barrier(2)
    policy = Recorded(["a", "b"], barrier=barrier)
    session = Count([go_on(), go_on(reward=1.0, done=True)])

    async def law(at: Endpoint) -> None:
        async with asyncio.timeout(60):
            asking = asyncio.create_task(ask(at, [user("slow")]))
            while not barrier.n_waiting:
                await asyncio.sleep(0.005)
            _, result = await at.post("/env/step", {"action": "left"})
            assert result["done"] is False
            await asyncio.gather(asking, ask(at, [user("other")]))
            await at.post("/env/step", {"action": "right"})

    trajectory = captured(policy, law, session=session)
    assert trajectory.num_turns == 2
    assert set(trajectory.turn_ids.tolist()) == {1}


def test_rows_survive_the_wire_and_an_older_version() -> None:
    async def law(at: Endpoint) -> None:
        answer = await ask(at, [USER])
        for text in ("left", "right"):
            await ask(at, [USER, answer, user(text)])

    trajectory = captured(Recorded(["a", "b", "c"]), law)
    newest = decode(encode(trajectory))
    older = decode(encode(trajectory, 3))
    assert not older.segment_prefixes.size
    assert trained(newest) == trained(older) == trained(trajectory)
    assert sum(map(len, encode(trajectory)[1:])) < sum(map(len, encode(trajectory, 3)[1:]))
    rows = [row.token_ids.tolist() for row in as_rows(trajectory)]
    assert [row.token_ids.tolist() for row in as_rows(older)] == rows


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_train_each_token_once(seed: int) -> None:
    """An agent continues any earlier conversation, at once, and rewrites some of them."""
    rng = random.Random(seed)
    words = [f"answer {number % 7}" for number in range(40)]

    async def law(at: Endpoint) -> None:
        histories: list[list[dict[str, Any]]] = [[user("root")]]

        async def one() -> None:
            history = list(rng.choice(histories))
            if len(history) > 2 and rng.random() < 0.3:
                place = rng.randrange(len(history))
                history[place] = {**history[place], "content": f"other {rng.randrange(3)}"}
            answer = await ask(at, history, n=rng.choice([1, 1, 2]))
            histories.append([*history, answer, user(f"next {rng.randrange(3)}")])

        for _ in range(6):
            await asyncio.gather(*(one() for _ in range(3)))
            await at.post("/env/step", {"action": "on"})

    trajectory = captured(Recorded(words), law)
    leaves = len(segments_of(trajectory))
    assert leaves == len(as_rows(trajectory)) > 1
    assert RENDERER.num_tokens > max(trajectory.token_ids.tolist())


def test_deep_conversation_needs_no_deep_stack() -> None:
    lineages = Lineages()
    ids = [5]
    for number in range(1_100):
        taken = Turn([number % 7], [-1.0], [0])
        latest = lineages.add(ids, taken, 0, messages=[], thoughts={}, tools=[])
        ids = [*ids, *taken.token_ids, 9]
    assert latest.token_ids == lineages.tape(last_turn=0).token_ids.tolist() == ids[:-1]
    assert lineages.tape(last_turn=0).starts == [0]


@pytest.mark.parametrize(
    ("words", "law"),
    [
        ([], "must be all without actor.endpoint=true"),
        (
            ["actor.endpoint=true", "actor.agent=[x]", "algorithm.advantage=ppo"],
            "must be all with algorithm.advantage=ppo",
        ),
    ],
)
def test_row_credit_without_conversations_is_refused_by_its_key(words: list[str], law: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.row_credit='root'.*{law}"):
        load_config("quickstart", ["algorithm.row_credit=root", *words])
