"""Laws of an agent that starts sub-agents and rewrites its history: rows, their bytes, credit."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.formats.renderer import Renderer
from common.config.algorithm import AlgorithmSection, RowCredit
from common.segments import as_rows, prefixes_of
from common.wire.codec import decode, encode
from common.wire.messages import Trajectory
from learner.batch.batching import rows_of
from learner.ingest.buffer import Group
from learner.journal.journal import JournalWriter, read_journal
from learner.objective.advantages import samples_of
from tests.actor.agents.endpoint import Endpoint
from tests.actor.agents.test_histories import thinking
from tests.actor.agents.test_lineages import Recorded, ask, captured, said, trained, user
from tests.actor.agents.test_tool_calls import LOOK, TOKENIZER, TOOL

SYSTEM = {"role": "system", "content": "Work alone, and report in a few words. " * 20}
NUM_SUB_AGENTS = 6
BEFORE_PREFIXES = 3  # The schema of messages whose rows repeat their beginnings.


async def sub_agent(at: Endpoint, name: str, *, num_turns: int = 2) -> str:
    """Work as a sub-agent with the system text that all have; return its last answer."""
    history: list[dict[str, Any]] = [SYSTEM, user(f"Look at {name}.")]
    for _ in range(num_turns):
        answer = await ask(at, history)
        history += [answer, user("Go on.")]
    return history[-2]["content"]


async def main_agent(at: Endpoint) -> None:
    """Delegate twice to sub-agents that work at once, then answer."""
    history = [user("Find the key.")]
    for _ in range(2):
        history.append(await ask(at, history))
        names = [f"house {number}" for number in range(NUM_SUB_AGENTS)]
        reports = await asyncio.gather(*(sub_agent(at, name) for name in names))
        history.append(user(" ".join(reports)))
    await ask(at, history)


def with_sub_agents() -> Trajectory:
    return captured(Recorded([f"answer {number % 10}" for number in range(60)]), main_agent)


def text_of(row: Trajectory) -> str:
    return f"{TOKENIZER.decode(row.token_ids)}"


def test_each_sub_agent_is_a_row_and_the_main_agent_is_one() -> None:
    trajectory = with_sub_agents()
    rows = as_rows(trajectory)
    # The second delegation begins with the same prompts, whose answers are other ones.
    assert len(rows) == 1 + 2 * NUM_SUB_AGENTS
    assert text_of(rows[0]).count("assistant") == 3
    assert "Find the key" in text_of(rows[0])
    assert all("Work alone" in text_of(row) for row in rows[1:])
    assert sum(int(row.loss_mask.sum()) for row in rows) == int(trajectory.loss_mask.sum())


def test_shared_beginning_is_stored_once_on_the_wire_and_in_the_journal(tmp_path: Path) -> None:
    trajectory = with_sub_agents()
    num_system = len(TOKENIZER.encode(SYSTEM["content"], add_special_tokens=False))
    in_rows = sum(len(row.token_ids) for row in as_rows(trajectory))
    num_stored = len(trajectory.token_ids)
    # One sub-agent's row has the system text.
    assert in_rows - num_stored >= (2 * NUM_SUB_AGENTS - 1) * num_system
    assert sum(num for _, num in prefixes_of(trajectory)) == in_rows - num_stored
    on_wire: dict[bool, int] = {}
    in_journal: dict[bool, int] = {}
    for is_shared in (True, False):
        frames = encode(trajectory) if is_shared else encode(trajectory, BEFORE_PREFIXES)
        folder = tmp_path / f"{is_shared}"
        writer = JournalWriter(folder)
        writer.append(decode(frames), [bytes(frame) for frame in frames])
        writer.close()
        ((_, read),) = read_journal(folder)
        assert trained(read) == trained(trajectory)
        on_wire[is_shared] = sum(map(len, frames))
        in_journal[is_shared] = sum(file.stat().st_size for file in folder.iterdir())
    bytes_per_token = 12  # At least: an id, a version and a turn.
    saved = bytes_per_token * (in_rows - num_stored)
    assert on_wire[False] - on_wire[True] > saved
    assert in_journal[False] - in_journal[True] > saved
    assert on_wire[True] < on_wire[False] / 3
    assert in_journal[True] < in_journal[False] / 3


@pytest.mark.parametrize("credit", RowCredit)
def test_credit_of_an_episode_goes_to_its_rows_as_set(credit: RowCredit) -> None:
    trajectory = with_sub_agents()
    members = [_rewarded(trajectory, 1.0), _rewarded(trajectory, 0.0)]
    algorithm = AlgorithmSection(row_credit=credit, normalize_std=False)
    samples = samples_of([Group(group_id="g", members=members)], algorithm)
    rows = rows_of(samples)[: 1 + 2 * NUM_SUB_AGENTS]
    counts = [int(row.trajectory.loss_mask.sum()) for row in rows]
    expected = {
        RowCredit.ALL: [1.0] * len(rows),
        RowCredit.ROOT: [1.0] + [0.0] * (len(rows) - 1),
        RowCredit.SHARE: [count / sum(counts) for count in counts],
    }[credit]
    for row, count, value in zip(rows, counts, expected, strict=True):
        assert row.token_advantages().tolist() == pytest.approx([value] * count)


def _rewarded(trajectory: Trajectory, reward: float) -> Trajectory:
    """Return the episode as the member of a group with a reward."""
    scores = np.full(trajectory.num_turns, reward, dtype=np.float32)
    member = int(reward)
    return replace(trajectory, reward=reward, turn_scores=scores, member=member)


@pytest.mark.parametrize("kind", ["thoughts", "system", "result"])
def test_rewritten_part_begins_a_row_at_its_first_different_token(kind: str) -> None:
    """The second request repeats the first one's history, with another text in one place."""
    is_result = kind == "result"
    tokenizer = thinking() if kind == "thoughts" else TOKENIZER
    renderer = Renderer(tokenizer)
    policy = Recorded([LOOK if is_result else "go", "b", "c"], renderer=renderer)
    tools = [TOOL] if is_result else []

    def history(text: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
        system = {"role": "system", "content": text if kind == "system" else "Be brief."}
        answer = {**answer, "reasoning_content": text} if kind == "thoughts" else answer
        result = user("Go on.")
        if is_result:
            call = answer["tool_calls"][0]["id"]
            result = {"role": "tool", "content": text, "tool_call_id": call}
        return [system, user("Which way?"), answer, result]

    async def law(at: Endpoint) -> None:
        answer = said("I said this.")
        if is_result:
            system = {"role": "system", "content": "Be brief."}
            answer = await ask(at, [system, user("Which way?")], tools=tools)
        for text in ("A long text.", "A long note."):
            await ask(at, history(text, answer), tools=tools)

    trajectory = captured(policy, law)
    first, second = as_rows(trajectory)
    num_shared = prefixes_of(trajectory)[1][1]
    assert first.token_ids[num_shared] != second.token_ids[num_shared]
    assert first.token_ids[:num_shared].tolist() == second.token_ids[:num_shared].tolist()
    assert f"{tokenizer.decode(second.token_ids[:num_shared])}".rstrip().endswith("A long")
    assert "note" in tokenizer.decode(second.token_ids[num_shared:])


def test_thoughts_put_back_continue_the_row_that_sampled_them() -> None:
    """The answer stays as it was sampled; the agent may return its thoughts or leave them out."""
    renderer = Renderer(thinking())
    for keeps_thoughts in (True, False):

        async def law(at: Endpoint, keeps_thoughts: bool = keeps_thoughts) -> None:
            answer = await ask(at, [user("Which way?")])
            assert answer["reasoning_content"] == "Left?"
            if not keeps_thoughts:
                del answer["reasoning_content"]
            await ask(at, [user("Which way?"), answer, user("Go on.")])

        policy = Recorded(["<think>\nLeft?\n</think>\n\ngo", "b"], renderer=renderer)
        assert len(as_rows(captured(policy, law))) == 1
