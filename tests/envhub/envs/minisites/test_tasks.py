"""The tasks of the self-hosted sites: enough of them, solvable, and not solved by themselves."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from envhub.envs.minisites.env import DOMAINS, SUBSETS, make_app, make_task, split_tasks
from tests.envhub.envs.minisites.sites_browser import Browser, satisfies
from tests.marks import long_for

MAX_SOLUTION_STEPS = 12
EVERY = 11  # shares no factor with the number of any site's templates
SAMPLE = [(s, "train", i) for s in SUBSETS for i in range(1, SUBSETS[s].num_train, EVERY)]
SAMPLE += [(s, "test", i) for s in SUBSETS for i in range(1, SUBSETS[s].num_test, EVERY)]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_app()) as client:
        yield client


def walk(client: TestClient, subset: str, split: str, index: int) -> None:
    """Follow one task's solution; the check must fail before and hold after."""
    task = make_task(subset, split, index)
    client.post("/__reset__", json={"session": "walker", "seed": task["site_seed"]})
    browser = Browser(client, "walker")
    browser.goto(task["start_url"])
    assert browser.status == 200
    assert not satisfies(browser, task["eval"], ""), f"{task['task_id']} is solved at the start"
    *steps, last = task["solution"]
    assert len(steps) < MAX_SOLUTION_STEPS
    assert last["do"] == "stop"
    for step in steps:
        browser.do(step)
        assert browser.status == 200, f"{task['task_id']}: {step} led to {browser.url}"
    if "string_match" in task["eval"]["eval_types"]:
        assert not satisfies(browser, task["eval"], ""), f"{task['task_id']} needs no answer"
    assert satisfies(browser, task["eval"], last["answer"]), f"{task['task_id']}: {task}"


@pytest.mark.slow
@pytest.mark.parametrize("subset", long_for(SUBSETS, ["CMS", "Maps", "Reddit"]))
def test_every_template_has_a_minimal_solution_of_its_check(
    client: TestClient, subset: str
) -> None:
    for split in ("train", "test"):
        first = {
            task.template: i for i, task in reversed(list(enumerate(split_tasks(subset, split))))
        }
        assert set(first) == set(DOMAINS[subset].templates)
        for index in first.values():
            walk(client, subset, split, index)


@pytest.mark.long
@pytest.mark.slow
def test_sampled_tasks_have_minimal_solutions_of_their_checks(client: TestClient) -> None:
    for subset, split, index in SAMPLE:
        walk(client, subset, split, index)


@pytest.mark.parametrize("subset", SUBSETS)
def test_subset_has_eight_templates_and_three_check_kinds(subset: str) -> None:
    spec = SUBSETS[subset]
    assert spec.num_train >= 200
    assert spec.num_test >= 50
    templates = Counter(task.template for task in split_tasks(subset, "train"))
    assert len(templates) >= 8
    kinds = Counter(
        kind for task in split_tasks(subset, "train") for kind in task.draft.check["eval_types"]
    )
    assert set(kinds) == {"string_match", "url_match", "program_html"}
    assert min(kinds.values()) >= 20


@pytest.mark.parametrize("subset", SUBSETS)
def test_intents_are_unique_within_and_across_splits(subset: str) -> None:
    train = [task.draft.intent for task in split_tasks(subset, "train")]
    test = [task.draft.intent for task in split_tasks(subset, "test")]
    assert len(train) == len(set(train)) == SUBSETS[subset].num_train
    assert len(test) == len(set(test)) == SUBSETS[subset].num_test
    assert set(train).isdisjoint(test)


def test_index_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError):
        make_task("Maps", "test", SUBSETS["Maps"].num_test)


@pytest.mark.long
@pytest.mark.slow
def test_tasks_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "import hashlib, json\n"
        "from envhub.envs.minisites.env import SUBSETS, make_task\n"
        "tasks = [make_task(s, 'test', i) for s in SUBSETS for i in range(SUBSETS[s].num_test)]\n"
        "import sys; sys.stdout.write(hashlib.sha256(json.dumps(tasks).encode()).hexdigest())\n"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            encoding="utf-8",
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1
