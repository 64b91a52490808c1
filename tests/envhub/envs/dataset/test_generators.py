"""Laws of generated tasks: their splits, options and verifier, with the real package."""

import os
import subprocess
from pathlib import Path

import pytest

from common.config.envs import DatasetOptions
from common.repository import ROOT
from envhub.envs.dataset.env import check
from envhub.envs.dataset.generators import instruction_for, split_of_question
from envhub.envs.dataset.graders import verified
from tests.envhub.envs.dataset.made import make
from tests.venvs import python_with

PLAYED = r"""
import asyncio
import sys

sys.path.insert(0, "ROOT")
from common.config.envs import DatasetOptions, EnvsSection
from envhub.env import Style
from envhub.envs.dataset.env import check, make_spec
from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset


def section(train="reasoning_gym:chain_sum", **options):
    return EnvsSection(dataset=DatasetOptions(train=train, **options))


small = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}
spec = make_spec(section(options=small, train_size=300, reward="auto"))
subset = spec.subsets["data"]
assert (subset.num_train, subset.num_validation, subset.num_test) == (300, 200, 200)


async def questions(spec, split, num, subset="data"):
    env = spec.make(Style.COMPACT)
    return [await env.reset(f"{subset}-{split}-{index}", 0) for index in range(num)]


async def played(spec, answer, item="data-test-0"):
    env = spec.make(Style.COMPACT)
    await env.reset(item, 0)
    return (await env.step(answer.format(await env.expert_action()))).reward


async def main():
    # At most 200 different questions exist: seeds alone would put test questions into training.
    splits = ("train", "validation", "test")
    sets = {split: {*await questions(spec, split, 80)} for split in splits}
    assert all(sets.values())
    assert not sets["train"] & sets["test"] and not sets["train"] & sets["validation"]
    assert not sets["test"] & sets["validation"]
    # The record is the library's own item of its seed.
    record = {"task": "chain_sum", "options": small["chain_sum"]}
    dataset = ChainSumDataset(ChainSumConfig(**record["options"], seed=0, size=1))
    held = make_spec(section(options=small))
    first = (await questions(held, "test", 1))[0]
    assert first in {dataset[2_000_000_000 + n]["question"] for n in range(128)}
    assert await played(spec, "So it is <answer>1</answer>, no, {}") == 1.0
    assert await played(spec, "I do not know. <answer></answer>") == 0.0
    assert await played(make_spec(section(system="Be short.")), "#### {}") == 1.0
    # The verifier pays in part for a longer number that contains the answer, exact_number nothing.
    bare = {"options": small, "system": "Be short."}
    assert 0 < await played(make_spec(section(**bare)), "1{}") < 1
    exact = make_spec(section(reward="exact_number", **bare))
    assert await played(exact, "1{}") == 0.0
    assert await played(exact, "The sum of both is {}.") == 1.0
    # The verifier of this task raises ValueError for a text that is no number.
    factors = make_spec(section("reasoning_gym:prime_factorization"))
    assert await played(factors, "<answer>no</answer>") == 0.0
    assert await played(factors, "{}") == 1.0
    # The items of this one are made at its start, all from one seed.
    words = make_spec(section("reasoning_gym:word_ladder"))
    assert len({*await questions(words, "train", 3)}) == 3
    several = make_spec(section("reasoning_gym:chain_sum,leg_counting", options=small))
    assert [*several.subsets] == ["chain_sum", "leg_counting"]
    assert "leg" in (await questions(several, "train", 1, "leg_counting"))[0]
    assert await played(several, "{}", "leg_counting-train-5") == 1.0
    assert several.content.keys() == {"data.train chain_sum", "data.train leg_counting"}


asyncio.run(main())
for data, words in (
    (section("reasoning_gym:chain_sums"), "no such task; the nearest is 'chain_sum'"),
    (section(options={"chain_sum": {"terms": 2}}), "chain_sum.terms=2: no such option"),
    (section(options={"chain_sum": {"seed": 2}}), "the split sets the seeds"),
    (section(options={"chain_sum": {"max_terms": 1}}), "max_terms must be >= min_terms"),
    (section(options={"leg": {}}), "data.options.leg: data.train=reasoning_gym:chain_sum has no"),
    (section(shuffle=3), "data.shuffle=3: has no effect with data.train=reasoning_gym:TASK"),
    (section(train_size=0), "no record is left for training"),
    (section("reasoning_gym:game_of_life_halting"), "its verifier pays 1 for 'I do not know.'"),
    (
        section(options={"chain_sum": {"max_terms": 1, "min_terms": 1, "max_digits": 1}}),
        "",
    ),
):
    (line,) = check(data) or [""]
    assert words in line, (words, line)
print("equal")
"""


# Their generators depend on the hash seed or on the process-wide random generator.
REPEATED = r"""
import asyncio
import hashlib
import sys

sys.path.insert(0, "ROOT")
from common.config.envs import DatasetOptions, EnvsSection
from common.errors import EnvFailure
from envhub.env import Style
from envhub.envs.dataset.env import make_spec

TASKS = ("polynomial_multiplication", "ransom_note", "isomorphic_strings", "list_functions")


async def main():
    sizes = {"train_size": 20, "validation_size": 1, "eval_size": 1, "reward_retries": 0}
    options = DatasetOptions(train="reasoning_gym:" + ",".join(TASKS), **sizes)
    spec = make_spec(EnvsSection(dataset=options))
    texts = []
    for task in TASKS:
        for index in (4, 1, 0) if sys.argv[1] == "1" else (0, 1, 4):
            env = spec.make(Style.COMPACT)
            texts.append((await env.reset(f"{task}-train-{index}", 0), task, index))
            assert (await env.step(await env.expert_action())).reward == 1.0, texts[-1]
    env = spec.make(Style.COMPACT)
    await env.reset("ransom_note-train-0", 0)
    env._record = {**env._record, "question": "Another one?"}
    try:
        await env.step("True")
    except EnvFailure as error:
        assert "ransom_note generates another question from the seed" in str(error), error
    else:
        raise AssertionError("another question was scored")
    await spec.stop()
    print(hashlib.sha256(repr(sorted(texts)).encode()).hexdigest())


asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.slow
def test_reference_answers_of_generated_tasks_are_right_in_every_process() -> None:
    python = python_with("reasoning-gym==0.1.25", sees_ours=True)
    argv = [python, "-W", "ignore", "-c", REPEATED.replace("ROOT", str(ROOT))]
    digests: set[str] = set()
    for seed in ("0", "1"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [*argv, seed], cwd=ROOT, env=environ, capture_output=True, encoding="utf-8", timeout=140
        )
        assert done.returncode == 0, done.stderr[-3000:]
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.long
@pytest.mark.slow
def test_generated_tasks_have_disjoint_splits_and_their_own_verifier() -> None:
    python = python_with("reasoning-gym==0.1.25", sees_ours=True)
    argv = [python, "-W", "ignore", "-c", PLAYED.replace("ROOT", str(ROOT))]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=280)
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]


def test_missing_generator_names_the_extra(tmp_path: Path) -> None:
    pytest.importorskip("importlib.util")
    from importlib.util import find_spec

    if find_spec("reasoning_gym") is not None:
        pytest.skip("reasoning-gym is installed")
    options = make(tmp_path, reward=None)
    generated = DatasetOptions(train="reasoning_gym:chain_sum")
    (line,) = check(type(options)(dataset=generated))
    assert line == (
        "reasoning_gym: the Python package is missing; install it with"
        " `pip install reasoning-gym==0.1.25` (the extra `reasoning-gym`)"
    )


def test_options_without_a_generator_are_refused(tmp_path: Path) -> None:
    (line,) = check(make(tmp_path, options={"chain_sum": {}}))
    assert line == "data.options={'chain_sum': {}}: only generated tasks have options"


def test_verifier_without_a_generator_is_refused(tmp_path: Path) -> None:
    (line,) = check(make(tmp_path, reward="verifier"))
    assert line.startswith("reward=verifier: only generated tasks have a verifier")


def test_automatic_reward_of_a_file_compares_numbers(tmp_path: Path) -> None:
    from tests.envhub.envs.dataset.made import played

    assert played(make(tmp_path, reward="auto"), "It is 7.").reward == 1.0


def test_question_belongs_to_one_split_by_its_text() -> None:
    splits = [split_of_question(f"What is {i}?") for i in range(1000)]
    counts = {name: splits.count(name) for name in ("train", "validation", "test")}
    assert sum(counts.values()) == 1000
    # Expected 600, 200 and 200; five standard deviations are 78 and 63.
    assert 520 < counts["train"] < 680
    assert 137 < counts["validation"] < 263
    assert 137 < counts["test"] < 263


def test_instruction_yields_to_an_own_system_prompt() -> None:
    generated = "reasoning_gym:chain_sum"
    assert "<answer>ANSWER</answer>" in instruction_for(DatasetOptions(train=generated))
    assert instruction_for(DatasetOptions(train=generated, system="Be short.")) == ""
    assert instruction_for(DatasetOptions(train="questions.jsonl")) == ""


class BrokenVerifier:
    """A verifier that raises an error for some texts."""

    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float:
        if answer in ("x", entry["bad"]):
            raise TypeError("no number")
        return 0.5


class RoundedVerifier:
    """A verifier whose score is a sum of shares."""

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return sum([1 / 9] * len(answer))


def test_score_that_exceeds_one_by_rounding_is_one() -> None:
    assert verified(RoundedVerifier(), {"answer": "x" * 9}, "x" * 9, task="letters") == 1.0
    assert verified(RoundedVerifier(), {"answer": "x" * 9}, "xxx", task="letters") == sum(
        [1 / 9] * 3
    )


def test_error_of_a_verifier_is_a_score_only_if_it_works_on_the_reference() -> None:
    generator = BrokenVerifier()
    assert verified(generator, {"answer": "7", "bad": None}, "8", task="sum") == 0.5
    assert verified(generator, {"answer": "7", "bad": None}, "x", task="sum") == 0.0
    with pytest.raises(ValueError, match=r"of sum failed: TypeError: no number; it fails on the"):
        verified(generator, {"answer": "7", "bad": "7"}, "x", task="sum")
    with pytest.raises(ValueError, match=r"of sum failed: .*; no reference answer shows that"):
        verified(generator, {"answer": None, "bad": None}, "x", task="sum")
