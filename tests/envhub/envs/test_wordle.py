"""Laws of Wordle: the marks, the word that is not chosen yet, and the expert."""

import random
from collections import Counter

import pytest

from common.config.envs import EnvsSection
from envhub.env import Style, UnknownItem, parse_item
from envhub.envs.wordle.env import VOCABULARY, WordleEnv, best_guess, consistent, make_spec, marks
from tests.envhub.envs.playing import elsewhere, expert_results, item_of


def started(item_id: str = "Common-train-0", style: Style = Style.COMPACT) -> WordleEnv:
    env = WordleEnv(style)
    env.reset(item_id, 0)
    return env


def transcript(item_id: str) -> list[str]:
    env = WordleEnv(Style.COMPACT)
    lines = [env.reset(item_id, 0)]
    rng = random.Random(item_id)
    while env.valid_actions():
        lines.append(env.step(rng.choice(env.valid_actions())).observation)
    return [*lines, env.fingerprint()]


def most_guesses(words: tuple[str, ...]) -> int:
    """Return the guesses that the expert needs for the worst of these words."""
    guess = best_guess(words)
    groups = Counter(marks(guess, word) for word in words)
    rest = [consistent(words, guess, answer) for answer in groups if answer != "ggggg"]
    return 1 + max((most_guesses(left) for left in rest), default=0)


def test_vocabulary_is_forty_words_of_five_letters():
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 40
    assert all(len(word) == 5 and word.isalpha() and word.islower() for word in VOCABULARY)


@pytest.mark.parametrize(
    ("guess", "hidden", "expected"),
    [
        ("house", "house", "ggggg"),
        ("house", "mouse", "bgggg"),
        ("earth", "heart", "yyyyy"),
        ("green", "bread", "bggyb"),  # the second e is marked, too, though there is but one
        ("apple", "peach", "yyyby"),
        ("glass", "house", "bbbgy"),
    ],
)
def test_marks_encode_place_presence_and_absence(guess, hidden, expected):
    assert marks(guess, hidden) == expected


def test_first_compact_observation_lists_the_words():
    words, prompt = WordleEnv(Style.COMPACT).reset("Common-test-0", 0).split("\n")
    assert words.removeprefix("words: ").split() == list(VOCABULARY)
    assert prompt == "guess"


def test_agentgym_sentences():
    env = WordleEnv(Style.AGENTGYM)
    first = env.reset("Common-train-0", 0)
    assert "\n".join(["```", *VOCABULARY, "```"]) in first
    assert env.step("zebra").observation == "invalid word"
    answer = env.step("Thought:\nfirst\n\nAction:\nh o u s e").observation
    assert len(answer) == 10
    assert answer.endswith("\n")
    assert set(answer) <= set("byg \n")


@pytest.mark.parametrize("text", ["", "zebra", "hous", "houses", "x" * 60_000, "\0", "h0use"])
def test_invalid_word_costs_a_guess(text):
    env = started()
    for number in range(6):
        result = env.step(text)
        assert (result.observation, result.reward, result.is_valid) == ("invalid word", 0.0, False)
        assert result.done == (number == 5)
    with pytest.raises(RuntimeError, match="ended"):
        env.step("house")


def test_answers_never_contradict_one_another():
    for index in range(50):
        env = started(f"Common-train-{index}")
        rng = random.Random(index)
        words = VOCABULARY
        while env.valid_actions():
            guess = rng.choice(env.valid_actions())
            answer = env.step(guess).observation
            words = consistent(words, guess.replace(" ", ""), answer.replace(" ", ""))
            assert words


def test_word_is_drawn_anew_with_every_guess():
    num_found = sum(
        started(f"Common-train-{index}").step("house").reward == 1 for index in range(400)
    )
    assert 2 <= num_found <= 25  # one in forty: ten are expected
    contradicted = 0
    for index in range(40):
        env = started(f"Common-train-{index}")
        env.step("house")
        # the first draw of an item does not depend on the guess; the second one is new
        first = random.Random(index).choice(VOCABULARY)
        contradicted += env.step("plant").observation.replace(" ", "") != marks("plant", first)
    assert contradicted >= 20


def test_win_leaves_one_possible_word():
    env = started()
    played = []
    while (action := env.expert_action()) is not None:
        played.append(action)
        result = env.step(action)
    assert (result.observation, result.reward, result.done) == ("g g g g g", 1.0, True)
    assert env.render().endswith("possible: " + played[-1].replace(" ", ""))


def test_expert_finds_every_word_in_time():
    assert most_guesses(VOCABULARY) <= 4
    for item_id in [f"Common-{split}-{i}" for split in ("train", "test") for i in range(100)]:
        env = started(item_id)
        rewards = [result.reward for result in expert_results(env)]
        assert rewards[-1] == 1.0
        assert len(rewards) <= 4


def test_items_of_train_and_test_draw_differently():
    train = {started(f"Common-train-{i}").fingerprint() for i in range(200)}
    assert not train & {started(f"Common-test-{i}").fingerprint() for i in range(200)}


def test_seed_names_the_item():
    spec = make_spec(EnvsSection())
    assert item_of(spec, 17) == "Common-train-17"
    for seed in (-1, 1_000_000):
        with pytest.raises(UnknownItem, match="out of range"):
            item_of(spec, seed)


def test_task_names_items_that_exist():
    spec = make_spec(EnvsSection())
    (task,) = spec.tasks.values()
    assert len(task.test) == 25
    for item_id in (*task.train, *task.test):
        parse_item(item_id, spec.subsets)


def test_item_is_the_same_in_every_process():
    for hash_seed in (0, 1):
        told = elsewhere(__name__, "transcript('Common-train-9')", hash_seed=hash_seed)
        assert told == transcript("Common-train-9")


def test_agentgym_style_accepts_spaced_lower_case_words_only():
    word = VOCABULARY[0]
    spaced = " ".join(word)
    for text, is_valid in {
        spaced: True,
        word: True,
        spaced.upper(): False,
        spaced.title(): False,
        "\t".join(word): False,
    }.items():
        env, compact = (WordleEnv(style) for style in (Style.AGENTGYM, Style.COMPACT))
        env.reset("Common-train-3")
        compact.reset("Common-train-3")
        assert env.step(text).is_valid is is_valid
        assert compact.step(text).is_valid
