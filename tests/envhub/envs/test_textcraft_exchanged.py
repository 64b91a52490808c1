"""Laws of TextCraft in exchanged words and other numbers."""

import re
from dataclasses import replace

import pytest

from common.config.envs import EnvsSection, TextcraftOptions
from envhub.env import Env, Style
from envhub.envs.textcraft.env import Exchange, ExchangedEnv, make_spec, our_catalogue
from envhub.envs.textcraft.tasks import MAX_TURNS
from tests.envhub.envs.playing import expert_results, new_episode

SPLITS = ("train", "test")
STYLES = [Style.COMPACT, Style.AGENTGYM]


def made(style: Style, *, frac: float) -> Env:
    """Return an environment that exchanges this share of its training items."""
    options = replace(EnvsSection(), textcraft=TextcraftOptions(exchanged_frac=frac))
    return new_episode(make_spec(options), style)


def test_word_exchange_is_a_bijection():
    words = ["oak", "log", "iron", "dye", "planks"]
    exchange = Exchange(words, "seed")
    text = "craft 4 oak planks using 1 oak log, 2 iron dye"
    shown = exchange.shown(text)
    assert shown != text
    assert exchange.meant(shown) == text
    assert sorted(map(exchange.shown, words)) == sorted(words)
    assert exchange.shown("craft 4 using 1, 2") == "craft 4 using 1, 2"


@pytest.mark.parametrize("style", STYLES)
def test_expert_solves_exchanged_training_items(style: Style):
    plain, exchanged = made(style, frac=0.0), made(style, frac=1.0)
    for depth in (1, 2, 3):
        item = f"depth{depth}-train-7"
        told = exchanged.reset(item, 0)
        assert told != plain.reset(item, 0)
        assert told == made(style, frac=1.0).reset(item, 0)
        assert exchanged.fingerprint() != plain.fingerprint()
        results = expert_results(exchanged)
        assert (results[-1].done, results[-1].reward) == (True, 1.0)
        assert all(each.is_valid for each in results)


def test_exchanged_goal_is_craftable_and_plain_commands_are_invalid():
    plain, exchanged = made(Style.COMPACT, frac=0.0), made(Style.COMPACT, frac=1.0)
    for number in range(20):
        item = f"depth1-train-{number}"
        plain.reset(item, 0)
        commands, _, goal = exchanged.reset(item, 0).rpartition("\ngoal: ")
        assert any(f" {goal} using " in command for command in commands.splitlines())
        crafts = [a for a in iter(plain.expert_action, None) if plain.step(a) and a[0] == "c"]
        assert not exchanged.step(crafts[-1]).is_valid


def test_exchanged_items_have_redrawn_numbers():
    plain, exchanged = made(Style.COMPACT, frac=0.0), made(Style.COMPACT, frac=1.0)
    num_kept = num_all = 0
    for number in range(60):
        item = f"depth1-train-{number}"
        before, after = (
            [re.findall(r"\d+", line) for line in env.reset(item, 0).splitlines()[:-1]]
            for env in (plain, exchanged)
        )
        assert list(map(len, before)) == list(map(len, after))
        num_kept += sum(one == other for one, other in zip(before, after, strict=True))
        num_all += len(before)
    assert num_kept < 0.25 * num_all


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_redrawn_items_are_solvable_within_the_turn_limit(depth: int):
    env = made(Style.COMPACT, frac=1.0)
    for number in range(100):
        env.reset(f"depth{depth}-train-{number * 11}", 0)
        results = expert_results(env)
        assert results[-1].reward == 1.0
        assert len(results) <= MAX_TURNS[depth]


def test_an_item_keeps_its_depth():
    env = made(Style.COMPACT, frac=1.0)
    env.reset("depth2-train-3", 0)
    crafts = {text for text in iter(env.expert_action, None) if env.step(text) and text[0] == "c"}
    assert len(crafts) >= 2  # An ingredient and the goal are crafted.


def test_exchanged_item_leaves_the_book_unchanged():
    plain, exchanged = made(Style.COMPACT, frac=0.0), made(Style.COMPACT, frac=1.0)

    def played(env: Env, item: str) -> list[str]:
        text = env.reset(item, 0)
        actions = [action for action in iter(env.expert_action, None) if env.step(action)]
        return [text, *actions]

    for number in range(30):
        items = [f"depth2-{split}-{number}" for split in SPLITS]
        assert played(exchanged, items[0]) != played(plain, items[0])
        assert played(exchanged, items[1]) == played(plain, items[1])


def test_exchange_changes_a_share_of_training_items_only():
    plain, half = made(Style.COMPACT, frac=0.0), made(Style.COMPACT, frac=0.5)

    def num_changed(split: str) -> int:
        items = [f"depth1-{split}-{number}" for number in range(200)]
        return sum(half.reset(item, 0) != plain.reset(item, 0) for item in items)

    assert num_changed("test") == 0
    assert 70 <= num_changed("train") <= 130


def test_distractor_limit_never_removes_needed_recipes():
    def num_shown(most: int) -> list[int]:
        options = TextcraftOptions(exchanged_frac=0.5, max_distractors=most)
        env = new_episode(make_spec(replace(EnvsSection(), textcraft=options)), Style.COMPACT)
        shown: list[int] = []
        for item in (f"depth1-{split}-{number}" for split in SPLITS for number in range(20)):
            shown.append(len(env.reset(item, 0).splitlines()) - 1)
            assert expert_results(env)[-1].reward == 1.0
        return shown

    none, one, usual = map(num_shown, (0, 1, -1))
    assert all(0 < a <= b <= min(a + 1, c) for a, b, c in zip(none, one, usual, strict=True))
    assert sum(one) > sum(none)
    assert max(c - a for a, c in zip(none, usual, strict=True)) == 5


def test_picture_and_valid_actions_use_the_exchanged_words():
    env = ExchangedEnv(Style.COMPACT, catalogue=our_catalogue(), frac=1.0)
    shown = env.reset("depth2-train-3", 0)
    actions = env.valid_actions()
    first = next(action for action in actions if action.startswith("get"))
    assert env.step(first).is_valid
    tree, held = (env.detail("picture")[key] for key in ("tree", "held"))
    assert shown.endswith(f"goal: {tree['name']}")
    assert held == {first.split(" ", 2)[2]: int(first.split()[1])}
    assert tree["parts"]
    assert all(part["name"] in shown for part in tree["parts"])
    assert f"goal: {tree['name']}" in env.render()
