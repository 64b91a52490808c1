"""WebArena's own tasks and addresses."""

import json

import pytest

from common.config.envs import WebarenaOptions
from envhub.env import ItemId, UnknownItem
from envhub.envs.webarena.env import check_urls, login_state, public_names, read_tasks


def raw_task(number, sites, *, locator="", references=None):
    target = {"url": "last", "locator": locator, "required_contents": {"exact_match": "x"}}
    return {
        "task_id": number,
        "sites": sites,
        "start_url": f"__{sites[0].upper()}__/page",
        "intent": f"task {number}",
        "eval": {
            "eval_types": ["string_match"],
            "reference_answers": references or {"exact_match": "x"},
            "reference_url": "",
            "program_html": [target],
        },
    }


@pytest.fixture
def tasks_path(tmp_path):
    tasks = [raw_task(i, ["shopping"]) for i in range(7)]
    tasks.append(raw_task(7, ["shopping_admin"], references={"fuzzy_match": ["y"]}))
    tasks.append(raw_task(8, ["gitlab", "reddit"]))
    tasks.append(raw_task(9, ["shopping"], locator="func:read_minds(__page__)"))
    path = tmp_path / "test.raw.json"
    path.write_text(json.dumps(tasks[::-1]), encoding="utf-8")
    return path


SITES = {"shopping": "http://10.0.0.1:7770", "shopping_admin": "http://10.0.0.1:7780/admin"}


def test_read_tasks_keeps_configured_sites_and_explains_omissions(tasks_path):
    table = read_tasks(tasks_path, SITES)
    sizes = {name: (spec.num_train, spec.num_test) for name, spec in table.subsets.items()}
    assert sizes == {"Shopping": (5, 2), "CMS": (0, 1)}
    assert table.skipped == {8: "envs.webarena.gitlab is not set", 9: "needs read_minds"}


def test_read_tasks_puts_addresses_in(tasks_path):
    task = read_tasks(tasks_path, SITES).task(ItemId(subset="CMS", split="test", index=0))
    assert task["start_url"] == "http://10.0.0.1:7780/admin/page"


def test_item_id_finds_a_webarena_number(tasks_path):
    table = read_tasks(tasks_path, SITES)
    assert table.item_id(5) == "Shopping-test-1"
    assert table.item_id(6) == "Shopping-train-4"
    with pytest.raises(UnknownItem, match="gitlab is not set"):
        table.item_id(8)


def test_public_names_translate_both_ways():
    names = public_names(SITES)
    assert names.public("see http://10.0.0.1:7780/admin/x") == "see http://luma.com/admin/x"
    assert names.local("http://onestopmarket.com/a?b=1") == "http://10.0.0.1:7770/a?b=1"
    assert names.local("onestopmarket.com") == "http://10.0.0.1:7770"
    assert names.local("http://onestopmarket.company/") == "http://onestopmarket.company/"


def test_check_urls_names_bad_addresses_and_missing_folders():
    options = WebarenaOptions(shopping="10.0.0.1:7770", auth_dir="/nowhere/at/all")
    first, second = check_urls(options)
    assert "envs.webarena.shopping" in first
    assert "envs.webarena.auth_dir" in second


def test_login_state_is_the_file_for_all_accounts(tmp_path):
    (tmp_path / "gitlab.reddit_state.json").write_text("{}", encoding="utf-8")
    options = WebarenaOptions(gitlab="http://g", reddit="http://r/", auth_dir=str(tmp_path))
    assert options.sites == {"reddit": "http://r", "gitlab": "http://g"}
    path = str(tmp_path / "gitlab.reddit_state.json")
    assert login_state(options, ["reddit", "gitlab"]) == path
    assert login_state(options, ["gitlab"]) is None
    assert login_state(options, ["map"]) is None
