"""Laws of TextCraft in exchanged words."""

from dataclasses import replace

import pytest

from common.config.envs import EnvsSection, TextcraftOptions
from envhub.env import Env, Style
from envhub.envs.textcraft.env import make_spec, our_catalogue
from envhub.envs.textcraft.exchange import Exchange, ExchangedEnv
from tests.envhub.envs.playing import expert_results, new_episode

STYLES = [Style.COMPACT, Style.AGENTGYM]


def made(style: Style, *, frac: float) -> Env:
    """Return an environment whose training items are exchanged so often."""
    options = replace(EnvsSection(), textcraft=TextcraftOptions(exchanged_frac=frac))
    return new_episode(make_spec(options), style)


def test_words_are_exchanged_one_for_one_and_back():
    words = ["oak", "log", "iron", "dye", "planks"]
    exchange = Exchange(words, "seed")
    text = "craft 4 oak planks using 1 oak log, 2 iron dye"
    shown = exchange.shown(text)
    assert shown != text
    assert exchange.meant(shown) == text
    assert sorted(map(exchange.shown, words)) == sorted(words)
    assert exchange.shown("craft 4 using 1, 2") == "craft 4 using 1, 2"


@pytest.mark.parametrize("style", STYLES)
def test_exchanged_training_item_is_solved_as_it_is_shown(style: Style):
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


def test_an_exchanged_goal_is_among_the_commands_and_what_the_plain_words_mean_is_not():
    plain, exchanged = made(Style.COMPACT, frac=0.0), made(Style.COMPACT, frac=1.0)
    for number in range(20):
        item = f"depth1-train-{number}"
        plain.reset(item, 0)
        commands, _, goal = exchanged.reset(item, 0).rpartition("\ngoal: ")
        assert any(f" {goal} using " in command for command in commands.splitlines())
        crafts = [a for a in iter(plain.expert_action, None) if plain.step(a) and a[0] == "c"]
        assert not exchanged.step(crafts[-1]).is_valid


def test_items_held_out_are_as_they_are_and_a_share_of_the_others_is_not():
    plain, half = made(Style.COMPACT, frac=0.0), made(Style.COMPACT, frac=0.5)

    def num_changed(split: str) -> int:
        items = [f"depth1-{split}-{number}" for number in range(200)]
        return sum(half.reset(item, 0) != plain.reset(item, 0) for item in items)

    assert num_changed("test") == 0
    assert 70 <= num_changed("train") <= 130


def test_a_picture_and_valid_actions_are_in_the_words_that_are_shown():
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
