"""Laws of equality with AgentGym's servers: our answers equal their recorded answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.config.envs import (
    EnvsSection,
    SearchqaOptions,
    SqlgymOptions,
    TextcraftOptions,
    WordleOptions,
)
from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions
from envhub.http.routes import make_app
from tests.envhub.agentgym.agentgym_clients import serve_app
from tests.envhub.agentgym.parity.search import retriever, write_questions
from tests.envhub.agentgym.parity.wire import Raw, digest, settled
from tests.envhub.agentgym.parity.world import HERE, write_bird, write_recipes

TRANSCRIPTS = json.loads((HERE / "transcripts.json").read_text(encoding="utf-8"))
# LMRL-Gym's words, which its seeds draw from.
WORDS = (
    "panic solar shire proxy point robot prick wince crimp knoll sugar whack mount perky could"
    " wrung light those moist shard pleat aloft skill elder frame humor pause ulcer ultra robin"
    " cynic aroma caulk shake dodge swill tacit other thorn trove"
)
# Every so many episodes, where they take long; of BabyAI's that is still every level once.
EVERY = {"sciworld": 7, "sqlgym": 4, "babyai": 3, "textcraft": 2, "searchqa": 3}


@contextmanager
def served(name: str, folder: Path, retriever_url: str) -> Iterator[Raw]:
    words = folder / "words.txt"
    words.write_text(WORDS.replace(" ", "\n"), encoding="utf-8")
    options = EnvsSection(
        agentgym_rules=True,
        textcraft=TextcraftOptions(recipes_dir=str(write_recipes(folder / "recipes"))),
        sqlgym=SqlgymOptions(bird_dir=str(write_bird(folder / "bird"))),
        wordle=WordleOptions(words=str(words)),
        searchqa=SearchqaOptions(
            questions_dir=str(write_questions(folder / "questions")), retriever_url=retriever_url
        ),
    )
    registry = Registry([name], options)
    sessions = Sessions(registry, idle_s=600.0, capacity=4, step_timeout_s=60.0)
    with serve_app(make_app(sessions, registry, token=None, step_timeout_s=60.0)) as url:
        raw = Raw(name, f"{url}/agentgym/{name}")
        yield raw
        raw.close()


def replay(name: str, raw: Raw, episode: dict[str, Any]) -> list[str]:
    """Return the answers that differ from the recording."""
    item = episode["item"]
    mark, is_fault = episode["reset"]
    begun = raw.reset(item)
    if is_fault:
        return [] if begun.fault else [f"{item} begins"]
    found = [] if digest(settled(name, begun.text, is_first=True)) == mark else [f"{item} reset"]
    for action, mark, *paid in episode["steps"]:
        told = raw.step(action)
        is_same_text = digest(settled(name, told.text, is_first=False)) == mark
        if [told.reward, told.score, told.done] != paid or not is_same_text:
            found.append(f"{item} {action!r}: {told}, not {paid}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_recorded_agentgym_plays_get_same_answers(name: str, tmp_path: Path):
    episodes = TRANSCRIPTS[name][:: EVERY.get(name, 1)]
    assert sum(len(episode["steps"]) for episode in episodes) >= 15
    with retriever() as url, served(name, tmp_path, url) as raw:
        differing = [text for episode in episodes for text in replay(name, raw, episode)]
    assert differing == []
