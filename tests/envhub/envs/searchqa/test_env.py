"""Laws of a deep-search episode."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config.envs import EnvsSection, SearchqaOptions
from common.errors import ConfigError
from envhub.env import Isolation, Style, UnknownItem
from envhub.envs.searchqa.env import SearchqaEnv, make_spec
from envhub.envs.searchqa.questions import DATASETS, make_question
from envhub.envs.searchqa.world.world import the_world

INVALID = (
    "Your previous action is invalid. If you want to search, you should put the query between "
    "<search> and </search>. If you want to give the final answer, you should put the answer "
    "between <answer> and </answer>. Please try again."
)


WORLD = make_spec(EnvsSection())


def make_env(style: Style = Style.COMPACT, **given: Any) -> SearchqaEnv:
    spec = make_spec(EnvsSection(searchqa=SearchqaOptions(**given))) if given else WORLD
    env = spec.make(style)
    assert isinstance(env, SearchqaEnv)
    return env


@pytest.fixture
def one_question(tmp_path: Path) -> dict[str, Any]:
    """Options of a question without known hops and a corpus of three passages."""
    question = {"question": "who baked the pie", "golden_answers": ["Ann Lee", "Lee"]}
    (tmp_path / "nq_test.jsonl").write_text(json.dumps(question) + "\n", encoding="utf-8")
    passages = [("Pie", "the pie was baked by Ann Lee"), ("Tart", "Bob"), ("Cake", "Cid")]
    rows = [json.dumps({"title": title, "text": text}) + "\n" for title, text in passages]
    (tmp_path / "corpus.jsonl").write_text("".join(rows), encoding="utf-8")
    return {"questions_dir": str(tmp_path), "corpus": str(tmp_path / "corpus.jsonl")}


def test_episode_is_a_search_and_an_answer(one_question: dict[str, Any]) -> None:
    env = make_env(**one_question)
    assert env.reset("nq-test-0") == "question: who baked the pie?"
    found = env.step("<think>hm</think><search>pie</search>")
    assert found.observation == "<information>Pie: the pie was baked by Ann Lee</information>"
    assert (found.reward, found.done, found.is_valid) == (0.0, False, True)
    ended = env.step("<answer>the lee!</answer>")
    assert (ended.observation, ended.reward, ended.done) == ("correct", 1.0, True)
    with pytest.raises(RuntimeError, match="ended"):
        env.step("<answer>lee</answer>")


def test_wrong_answer_ends_the_episode_by_default(one_question: dict[str, Any]) -> None:
    env = make_env(**one_question)
    env.reset("nq-test-0")
    ended = env.step("<answer>Bob</answer>")
    assert (ended.observation, ended.reward, ended.done) == ("incorrect", 0.0, True)
    assert ended.is_valid


def test_retry_option_continues_after_wrong_answer(one_question: dict[str, Any]) -> None:
    env = make_env(Style.AGENTGYM, retry=True, **one_question)
    env.reset("nq-test-0")
    wrong = env.step("<answer>Bob</answer>")
    assert wrong.observation == "Sorry, your answer is incorrect. Please try again."
    assert (wrong.reward, wrong.done) == (0.0, False)
    right = env.step("<answer>Lee</answer>")
    assert right.observation == "Congratulations! You have answered the question correctly."
    assert (right.reward, right.done) == (1.0, True)


def test_f1_pays_for_part_of_the_answer(one_question: dict[str, Any]) -> None:
    env = make_env(metric="f1", **one_question)
    env.reset("nq-test-0")
    ended = env.step("<answer>Ann Lee or Bob</answer>")  # 2 of 4 words, all of 2
    assert ended.reward == pytest.approx(2 / 3)
    assert ended.done


@pytest.mark.parametrize("text", ["", "search[pie]", "<search>pie", "<information>x</information>"])
def test_text_without_an_action_is_invalid(one_question: dict[str, Any], text: str) -> None:
    env = make_env(Style.AGENTGYM, **one_question)
    env.reset("nq-test-0")
    result = env.step(text)
    assert (result.observation, result.reward, result.done) == (INVALID, 0.0, False)
    assert not result.is_valid


def test_empty_search_reports_no_results(one_question: dict[str, Any]) -> None:
    env = make_env(**one_question)
    env.reset("nq-test-0")
    result = env.step("<search>zeppelin</search>")
    assert result.observation == "<information>No results.</information>"
    assert result.is_valid


def test_agentgym_first_observation_holds_rules_and_question() -> None:
    env = make_env(Style.AGENTGYM)
    observation = env.reset("nq-test-0")
    assert observation.endswith(
        "\n\n Question: which company published the novel theiltorn and the bridge?"
    )
    for tag in ("<think>", "<search>", "<information>", "<answer> Beijing </answer>"):
        assert tag in observation


def test_expert_without_hops_searches_once_and_answers(one_question: dict[str, Any]) -> None:
    env = make_env(**one_question)
    env.reset("nq-test-0")
    assert env.expert_action() == "<search>who baked the pie?</search>"
    env.step("<search>who baked the pie?</search>")
    assert env.expert_action() == "<answer>Ann Lee</answer>"


def test_expert_gives_up_when_search_misses(one_question: dict[str, Any]) -> None:
    env = make_env(num_passages=1, **one_question)
    env.reset("nq-test-0")
    path = Path(one_question["questions_dir"]) / "nq_test.jsonl"
    row = {"question": "who?", "golden_answers": ["Zoe"]}
    path.write_text(json.dumps(row) + " " * 100 + "\n", encoding="utf-8")
    env = make_env(num_passages=1, **one_question)
    env.reset("nq-test-0")
    env.step("<search>who?</search>")
    assert env.expert_action() is None


@pytest.mark.parametrize("subset", DATASETS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_expert_solves_the_items_of_the_world(subset: str, split: str) -> None:
    env = make_env()
    for index in range(0, 100, 5):
        env.reset(f"{subset}-{split}-{index}")
        num_hops = len(make_question(the_world().rows(subset, split)[index]).hops)
        for _ in range(num_hops + 1):
            action = env.expert_action()
            assert action is not None
            assert action in env.valid_actions()
            result = env.step(action)
            assert result.is_valid
            if result.done:
                break
        assert (result.reward, result.done) == (1.0, True)
        assert env.valid_actions() == []
        assert env.expert_action() is None


def test_unknown_item_is_named() -> None:
    with pytest.raises(UnknownItem, match="nq-test-99"):
        make_env().reset("nq-test-100")


def test_folder_without_questions_is_refused_at_start(tmp_path: Path) -> None:
    given = SearchqaOptions(questions_dir=str(tmp_path), retriever_url="http://h:1")
    with pytest.raises(ConfigError, match="holds no questions"):
        make_spec(EnvsSection(searchqa=given))


def test_spec_requests_a_worker_and_time_for_the_index(one_question: dict[str, Any]) -> None:
    spec = make_spec(EnvsSection(searchqa=SearchqaOptions(**one_question)))
    assert (spec.isolation, spec.sessions_per_worker, spec.max_workers) == (
        Isolation.WORKER,
        256,
        1,
    )
    assert spec.step_timeout_s is not None
    make_env(**one_question).reset("nq-test-0")
    built = make_spec(EnvsSection(searchqa=SearchqaOptions(**one_question)))
    assert built.step_timeout_s is None
    assert make_spec(EnvsSection()).step_timeout_s is None


def test_fingerprints_differ_between_items_only() -> None:
    env, other = make_env(), make_env(Style.AGENTGYM)
    prints = []
    for item in ("nq-test-0", "nq-test-1"):
        env.reset(item, 1)
        other.reset(item, 2)
        assert env.fingerprint() == other.fingerprint()
        prints.append(env.fingerprint())
    assert prints[0] != prints[1]
