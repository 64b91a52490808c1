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
from envhub.catalogue.content import contents_of, digests_of
from envhub.catalogue.registry import Registry
from envhub.digests import BLOCK_BYTES, digest_of_blocks, digests_of_packages
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


def test_changed_file_of_an_item_changes_the_digest_of_its_environment(tmp_path: Path) -> None:
    folder = write(tmp_path, is_reversed=False)
    digests = digests_of(contents_of(registry_of(folder)))
    assert digests.keys() == {"textcraft", "searchqa", "sqlgym"}
    owners = {"recipes": "textcraft", "questions": "searchqa", "passages": "searchqa"}
    for name, content in files().items():
        (folder / name).write_bytes(content + b"\n")
        changed = digests_of(contents_of(registry_of(folder)))
        owner = owners.get(name.partition("/")[0], "sqlgym")
        assert {env for env in digests if changed[env] != digests[env]} == {owner}
        (folder / name).write_bytes(content)
    assert digests_of(contents_of(registry_of(folder))) == digests


def test_digest_of_a_large_file_covers_its_ends_and_its_length(tmp_path: Path) -> None:
    path = tmp_path / "corpus"
    content = bytearray(BLOCK_BYTES * 3)
    seen: set[str] = set()
    for place in (None, 0, BLOCK_BYTES + 7, len(content) - 1):
        changed = bytearray(content)
        if place is not None:
            changed[place] = 1
        path.write_bytes(changed)
        seen.add(digest_of_blocks(path))
    path.write_bytes(content + b"\0")
    seen |= {digest_of_blocks(path)}
    path.write_bytes(b"")
    seen |= {digest_of_blocks(path)}
    assert len(seen) == 6


def test_item_list_and_package_belong_to_the_digest(tmp_path: Path) -> None:
    assert digests_of_packages("no-such-package") == {}
    assert contents_of(Registry(["babyai"]))["babyai"] == digests_of_packages("minigrid")
    path = tmp_path / "items.json"
    seen: list[dict[str, str]] = []
    for numbers in ([0, 1], [0, 2], [0, 1]):
        path.write_text(json.dumps(numbers), encoding="utf-8")
        options = edited(EnvsSection(), {"babyai.test_items": str(path)})
        seen.append(contents_of(Registry(["babyai"], options))["babyai"])
    assert seen[0].keys() == {"minigrid", "envs.babyai.test_items"}
    assert seen[0] != seen[1]
    assert seen[0] == seen[2]


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
