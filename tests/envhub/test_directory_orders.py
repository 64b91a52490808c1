"""Law: folders read the same in every process and in every directory order."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from common.config.envs import EnvsSection
from common.repository import ROOT
from envhub.catalogue.registry import Registry
from envhub.env import Env, Style
from tests.configs import edited
from tests.envhub.envs.sqlgym.pets import ASKED, CREATE_PETS, PETS
from tests.envhub.envs.test_textcraft_recipes import METAL, WOOD

CORPUS = [("Pie", "the pie was baked by Ann"), ("Tart", "a pie of Bob"), ("Cake", "no pie")]


def files() -> dict[str, bytes]:
    """Return the files of all folders by their path: recipes, questions, a corpus and BIRD."""
    found = {f"recipes/{name}.json": content for name, content in (WOOD | METAL).items()}
    for name in ("nq", "popqa", "bamboogle"):
        found[f"questions/{name}_test.jsonl"] = {"question": name, "golden_answers": ["Ann"]}
    for name in ("train", "dev"):
        found[f"bird/{name}/{name}.json"] = [{**ASKED, "question": name}]
        found[f"bird/{name}/{name}_tables.json"] = [PETS]
    rows = [json.dumps({"title": title, "text": text}) + "\n" for title, text in CORPUS]
    connection = sqlite3.connect(":memory:")
    connection.executescript(CREATE_PETS)
    databases = [f"bird/{name}/{name}_databases/pets/pets.sqlite" for name in ("train", "dev")]
    return {
        **{path: json.dumps(content).encode() for path, content in found.items()},
        **dict.fromkeys(databases, connection.serialize()),
        "passages/corpus.jsonl": "".join(rows).encode(),
    }


def write(folder: Path, *, is_reversed: bool) -> Path:
    """Write all files in the order of their names, or in the opposite one; return the folder."""
    for name, content in sorted(files().items(), reverse=is_reversed):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def registry_of(folder: Path) -> Registry:
    options = EnvsSection()
    options = edited(
        options,
        {
            "textcraft.recipes_dir": str(folder / "recipes"),
            "searchqa.questions_dir": str(folder / "questions"),
            "searchqa.corpus": str(folder / "passages" / "corpus.jsonl"),
            "sqlgym.bird_dir": str(folder / "bird"),
        },
    )
    return Registry(["textcraft", "searchqa", "sqlgym"], options)


def transcripts(folder: Path) -> dict[str, list[str]]:
    """Return all that is seen of every subset's first item, and the order of the goals."""
    registry = registry_of(folder)
    seen: dict[str, list[str]] = {"catalogue": [json.dumps(registry.catalogue(), sort_keys=True)]}
    from_agentgym = registry.spec("textcraft").from_agentgym
    assert from_agentgym is not None
    goals = [from_agentgym(index) for index in range(7)]
    items = {"textcraft": goals, "searchqa": ["nq-test-0", "popqa-test-0", "bamboogle-test-0"]}
    items["sqlgym"] = ["bird-train-0", "bird-test-0"]
    for name, item_ids in items.items():
        for item_id in item_ids:
            env = cast(Env, registry.spec(name).make(Style.AGENTGYM))
            texts = seen[f"{name} {item_id}"] = [env.reset(item_id, 0)]
            scripted = {"searchqa": ["<search>pie</search>"], "sqlgym": ["SELECT * FROM pet"]}
            for action in scripted.get(name) or iter(env.expert_action, None):
                texts.append(env.step(action).observation)
            env.close()
    return seen


def seen_elsewhere(folder: Path, hash_seed: str) -> dict[str, list[str]]:
    """Return the transcripts of another process."""
    code = (
        "import json, sys; from pathlib import Path; "
        "from tests.envhub.test_directory_orders import transcripts; "
        "print(json.dumps(transcripts(Path(sys.argv[1]))))"
    )
    env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=env,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_folder_contents_do_not_depend_on_directory_order(tmp_path: Path) -> None:
    forth = write(tmp_path / "forth", is_reversed=False)
    back = write(tmp_path / "back", is_reversed=True)
    listed = [[path.name for path in os.scandir(each / "recipes")] for each in (forth, back)]
    assert any(names != sorted(names) for names in listed)  # The test needs an unsorted folder.
    here = transcripts(forth)
    assert transcripts(back) == here
    assert seen_elsewhere(forth, "1") == here
    assert seen_elsewhere(back, "2") == here
    # Whatever the order of the folder, goals of a depth come by the names of their files.
    goals = [
        texts[0].rpartition("Goal: craft ")[2] for name, texts in here.items() if "depth" in name
    ]
    assert goals == [
        *("birch planks.", "iron ingot.", "oak planks.", "iron block.", "stick."),
        *("ladder.", "sign."),
    ]
