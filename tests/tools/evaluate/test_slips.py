"""Laws of demonstrations with random slips: only the expert's turns are trained."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actor.rollout.scripted import ScriptedPolicy, ScriptedRender
from benchmarks.actor.in_process import LocalSession
from common.config.actor import ContextKind
from common.config.tasks import TaskSection
from common.errors import ConfigError
from common.wire.messages import PolicyKind
from envhub.catalogue.registry import Registry
from envhub.env import Style
from envhub.hosting.sessions import Sessions
from envhub.http.routes import make_app
from tests.actor.toy_servers import serve
from tests.configs import edited
from tools.offline.config import SftConfig
from tools.offline.demonstrate import demonstrate

ITEM = "GoToObjMazeS4-train-3"
# Action, expert action, slipped, valid actions so far.
Played = list[tuple[str, str | None, bool, set[str]]]


def play(slip_frac: float, num_turns: int = 40) -> Played:
    """Play an item whose expert is asked before each turn."""
    env = Registry(["babyai"]).spec("babyai").make(Style.COMPACT)
    render, so_far = ScriptedRender(), set[str]()
    policy = ScriptedPolicy(PolicyKind.EXPERT, seed="s", render=render, slip_frac=slip_frac)
    told: Played = []

    async def episode() -> None:
        session = LocalSession(env, ITEM, 0)
        for _ in range(num_turns):
            hint = await session.hint()
            so_far.update(hint.valid_actions)
            said = render.action_text((await policy.act([], session)).token_ids)
            told.append((said, hint.expert_action, policy.has_slipped, set(so_far)))
            if (await session.step(said)).done:
                return

    asyncio.run(episode())
    return told


def test_slips_are_valid_actions_among_expert_turns() -> None:
    told = play(0.5)
    slips = [said != expert for said, expert, _, _ in told]
    assert [has_slipped for _, _, has_slipped, _ in told] == slips
    assert 0.2 < sum(slips) / len(slips) < 0.8
    assert all(said in valid for said, _, _, valid in told)
    assert play(0.5) == told, "the seed decides"
    assert len(told) > len(play(0)), "what went wrong has to be put right"
    assert not any(has_slipped for _, _, has_slipped, _ in play(0))


@contextmanager
def hub() -> Iterator[str]:
    registry = Registry(["babyai"])
    sessions = Sessions(registry, idle_s=600.0, capacity=64, step_timeout_s=60.0)
    with serve(make_app(sessions, registry, token=None, step_timeout_s=60.0)) as url:
        yield url


def shown(url: str, slip_frac: float, path: Path) -> list[tuple[str, bool]]:
    """Return (text, is trained) of all agent messages in some demonstrations."""
    changes = {
        "tasks": [TaskSection(env="babyai", subset="GoToObjMazeS4")],
        "sft.slip_frac": slip_frac,
        "sft.random_frac": 0.0,
        "sft.num_demonstrations": 8,
    }
    demonstrate(edited(SftConfig(), {"envhub.style": "compact", **changes}), url, "", path)
    records = [
        json.loads(line)["conversations"] for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return [(m["value"], m["loss"]) for record in records for m in record if m["from"] == "gpt"]


def test_slips_are_excluded_from_the_loss(tmp_path: Path) -> None:
    with hub() as url:
        told = shown(url, 0.5, tmp_path / "slips.jsonl")
        plain = shown(url, 0.0, tmp_path / "plain.jsonl")
    assert 0.2 < sum(is_learnt for _, is_learnt in told) / len(told) < 0.8
    assert all(is_learnt for _, is_learnt in plain)
    assert len(told) > len(plain)


def test_random_play_without_a_subset_is_refused_by_its_keys(tmp_path: Path) -> None:
    tasks = [TaskSection(env="babyai", subset="GoToObjMazeS4")]
    keys = {"tasks": tasks, "sft.expert_subsets": ["GoToObjMazeS4"], "sft.random_frac": 0.5}
    with pytest.raises(ConfigError, match=r"sft\.random_frac=0\.5: .* sft\.expert_subsets"):
        demonstrate(edited(SftConfig(), keys), "http://127.0.0.1:9", "", tmp_path / "none.jsonl")


def test_slips_in_branches_are_refused_by_name(tmp_path: Path) -> None:
    cfg = edited(SftConfig(), {"sft.slip_frac": 0.5})
    for context in (ContextKind.FOLD, ContextKind.SUBAGENT):
        branched = edited(cfg, {"sft.contexts": [ContextKind.FULL, context]})
        with pytest.raises(ConfigError, match=r"sft\.slip_frac=0\.5: .* branches have no slips"):
            demonstrate(branched, "http://127.0.0.1:9", "", tmp_path / "none.jsonl")
