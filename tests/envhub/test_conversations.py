"""Laws of what a model sees in AgentGym's style: its clients' texts, to the last character."""

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection
from envhub.agentgym.remote import make_spec
from envhub.catalogue.registry import Registry
from envhub.conversations import CONVERSATIONS
from envhub.env import Style
from envhub.envs.wordle.env import VOCABULARY
from tests.envhub.agentgym.agentgym_clients import DIRECT, make_client, serve_envs

ACK = "OK. I'll follow your instructions and try my best to solve the task."
# First half of SHA-256, of the clients' texts at AgentGym's commit 640f8bc.
HASHES = {
    "textcraft": {"instruction": "e4a4271272c21bf8"},
    "babyai": {"instruction": "f03929db839c07be"},
    "sciworld": {"instruction": "a342b760a710ee21"},
    "maze": {"instruction": "a5f0aea5bd65c603", "first": "4320d8b6dd55a798"},
    "wordle": {"instruction": "72cb8a40f92de19b", "first": "cf43c7d3d0519991"},
    "sqlgym": {"instruction": "50b479503fa97b11"},
    "searchqa": {"instruction": "ab80b9d09d68048a", "first": "419c8d22252f731a"},
    "webarena": {"instruction": "76b9c42998b99267"},
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", sorted(HASHES))
def test_texts_are_those_of_agentgyms_clients(name: str):
    told = CONVERSATIONS[name]
    assert {key: digest(getattr(told, key)) for key in HASHES[name]} == HASHES[name]
    short = name in ("sqlgym", "searchqa", "webarena")
    assert told.acknowledgement == ("Ok." if short else ACK)
    remote = make_spec(RemoteOptions(dialect=name, url="http://h"))
    assert remote.instruction[Style.AGENTGYM] == told.instruction
    assert remote.acknowledgement == {Style.AGENTGYM: told.acknowledgement}


@pytest.mark.parametrize("name", ["textcraft", "babyai", "sciworld", "maze", "wordle", "sqlgym"])
def test_our_environments_begin_as_agentgyms_clients_do(name: str):
    spec = Registry([name]).spec(name)
    assert digest(spec.instruction[Style.AGENTGYM]) == HASHES[name]["instruction"]
    assert spec.acknowledgement[Style.AGENTGYM] == CONVERSATIONS[name].acknowledgement
    assert Style.COMPACT not in spec.acknowledgement


def test_maze_and_wordle_first_observations_are_their_clients():
    with serve_envs("maze", "wordle") as url, httpx.Client(base_url=url, **DIRECT) as native:
        for name, item, start in (
            ("maze", "DoubleT-test-0", "The goal is at position 8, 6."),
            ("wordle", "Common-train-2", "Let's start Wordle!"),
        ):
            body = {"env": name, "item_id": item, "style": "agentgym"}
            first = native.post("/v1/sessions", json=body).json()["observation"]
            client = make_client(name, url)
            reply = client.wire.post("reset", {client.item_keys[name]: 2})["observation"]  # pyright: ignore
            assert reply.startswith(start)
            assert client.wire.get("observation") == reply
            text = "\n".join(VOCABULARY) if name == "wordle" else reply
            assert first == CONVERSATIONS[name].first_observation(text)
            assert len(first) > 1000


def test_question_has_agentgyms_wording(tmp_path: Path):
    row = {"question": "who wrote it", "golden_answers": ["me"]}
    (tmp_path / "nq_test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        json.dumps({"id": "0", "contents": "It\nI wrote it."}) + "\n", encoding="utf-8"
    )
    options: Any = EnvsSection()
    named = {"questions_dir": str(tmp_path), "corpus": str(corpus)}
    for retry in (False, True):
        searchqa = type(options.searchqa)(**named, retry=retry)
        env: Any = (
            Registry(["searchqa"], EnvsSection(searchqa=searchqa))
            .spec("searchqa")
            .make(Style.AGENTGYM)
        )
        first = env.reset("nq-test-0", 0)
        assert first.startswith("You must reason inside <think>...</think> first. If you do not")
        assert first.endswith("Follow this process every time.\n\n Question: who wrote it?")


def test_database_description_equals_sqlgyms():
    from envhub.envs.sqlgym.env import _schema_text
    from envhub.envs.sqlgym.problems import SchemaView

    design = {
        "table_names": ["Frequent Shop", "item"],
        "column_names": [(-1, "*"), (0, "shop ID"), (0, "Name"), (1, "item ID"), (1, "Shop")],
        "primary_keys": [1, [3, 4]],
        "foreign_keys": [[4, 1]],
    }
    view = SchemaView(name="shops", tables=(), references=(), design=design)
    assert _schema_text(view) == (  # recorded from sqlgym 0.1.2
        "shops contains tables such as frequent shop, item. Table frequent shop has columns such as"
        " shop id, name. shop id is the primary key. Table item has columns such as item id, shop."
        "  is the primary key. The shop id of item is the foreign key of name of frequent shop."
    )
