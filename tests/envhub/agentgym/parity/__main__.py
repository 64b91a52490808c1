"""Holds AgentGym's own servers against ours, step by step:

    python -m tests.envhub.agentgym.parity --agentgym PATH --python PATH [--envs a,b] [--record]

PATH is a clone of github.com/WooooDyy/AgentGym (commit 640f8bc) with its submodules, and an
interpreter that has what its servers need: fastapi, uvicorn, minigrid==2.3.1, gymnasium<1,
scienceworld, sqlgym, numpy<2; for LMRL-Gym what its requirements say. Nothing of it is part of
this project. Prints the table of docs/PARITY.md; --record writes transcripts.json.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.envhub.hub import hub_process
from common.config.envs import (
    EnvsSection,
    SearchqaOptions,
    SqlgymOptions,
    TextcraftOptions,
    WordleOptions,
)
from envhub.agentgym.dialects import DIALECTS
from envhub.agentgym.remote import extract
from envhub.catalogue.registry import Registry
from envhub.env import Style
from tests.envhub.agentgym.parity import search
from tests.envhub.agentgym.parity.wire import Raw, Told, digest, settled
from tests.envhub.agentgym.parity.world import HERE, OTHERS, RANGES, write_bird, write_recipes

WORDS = "agentenv-lmrlgym/lmrlgym/llm_rl_scripts/wordle/vocab/tweet_words.txt"
# Files are listed by name: the one thing in which the machine, not the code, decides TextCraft.
LAUNCH = """
import os, sys
listed = os.listdir
os.listdir = lambda *of: sorted(listed(*of))
import uvicorn
if sys.argv[3:]:
    import runpy
    runpy.run_path(sys.argv[3])
uvicorn.run(sys.argv[1], host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """How an AgentGym server is started and played, and its tolerated differences."""

    folder: str
    app: str
    items: Sequence[int]
    turns: int
    path: str = ""
    expert: float = 0.7  # share of the expert's actions
    nonsense: float = 0.06  # share of `junk`
    junk: Sequence[str] = ("", "look under the bed", "check available actions")
    stand_ins: Path | None = None  # run before the server starts


ORIGINALS = {
    "textcraft": Original(
        folder="agentenv-textcraft",
        app="agentenv_textcraft.server:app",
        items=range(0, 544, 4),
        turns=20,
        junk=("", "get 3 planks", "get 0 string", "craft 1 stick using planks", "Inventory"),
    ),
    "babyai": Original(
        folder="agentenv-babyai",
        app="agentenv_babyai.server:app",
        items=[level + 40 * seed for seed in (0, 45, 46, 49) for level in range(40)],
        turns=20,
        junk=("", "pickup red ball 9", "check available actions", "toggle", "drop", "Turn Left"),
    ),
    "sciworld": Original(
        folder="agentenv-sciworld",
        app="agentenv_sciworld.server:app",
        items=(0, 121, 663, 1097, 1399, 1440, 2340, 2940, 3540, 4140, 4172, 4240, 4400, 4630),
        turns=30,
        junk=("", "wait", "wait1", "focus on air", "dance"),
    ),
    "maze": Original(
        folder="agentenv-lmrlgym",
        app="agentenv_lmrlgym.server:app",
        path="/maze",
        items=range(27),
        turns=55,
        expert=0.25,
        junk=("", "MOVE LEFT", "left", "move  left", "go up"),
    ),
    "wordle": Original(
        folder="agentenv-lmrlgym",
        app="agentenv_lmrlgym.server:app",
        path="/wordle",
        items=range(60),
        turns=8,
        expert=0.8,
        junk=("", "C H A I R", "xyzzy", "a b c", " s h i r e "),
    ),
    "sqlgym": Original(
        folder="agentenv-sqlgym",
        app="agentenv_sqlgym.server:app",
        items=[first + i for first in RANGES.values() for i in range(6)] * 6,
        turns=1,
        expert=0.4,
        junk=OTHERS,
    ),
    "searchqa": Original(
        folder="agentenv-searchqa",
        app="agentenv_searchqa.server:app",
        items=search.indices() * 4,
        turns=6,
        expert=0.5,
        nonsense=0.35,
        junk=search.JUNK,
        stand_ins=search.STAND_INS,
    ),
}


@dataclass(slots=True)
class Tally:
    """The findings for one environment under one setting of the rules."""

    steps: int = 0
    equal: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])
    examples: list[str] = field(default_factory=list[str])

    def count(self, name: str, theirs: Told, ours: Told, where: str, *, is_first: bool) -> bool:
        """Count one answer; return whether both sides can continue."""
        self.steps += 1
        found = [
            cause
            for cause, differs in (
                ("error of one", theirs.fault != ours.fault),
                ("reward", (theirs.reward, theirs.score) != (ours.reward, ours.score)),
                ("done", theirs.done != ours.done),
            )
            if differs
        ]
        if theirs.text != ours.text:
            kept = [settled(name, each.text, is_first=is_first) for each in (theirs, ours)]
            found.append("text varied by the original" if kept[0] == kept[1] else "text")
        self.equal += not found
        self.causes.update(found)
        if {*found} - {"text varied by the original"} and len(self.examples) < 8:
            self.examples.append(f"{where}: {', '.join(found)}\n  theirs {theirs}\n  ours   {ours}")
        return theirs.done == ours.done and theirs.fault == ours.fault


def pick(rng: random.Random, env: Any, original: Original) -> str:
    """Return the next action: mostly what the expert or a legal player does, at times nonsense."""
    chance = rng.random()
    if chance < original.nonsense:
        return rng.choice(original.junk)
    action = env.expert_action() if chance < original.nonsense + original.expert else None
    return action or rng.choice(env.valid_actions() or [*original.junk])


def play(
    name: str, theirs: Raw, ours: Raw, guide: Any, index: int, tally: Tally
) -> dict[str, Any] | None:
    """Play an item on both; return the original's transcript, None if it has no such item."""
    original = ORIGINALS[name]
    rng = random.Random(f"{name} {index} {tally.steps}")
    begun = theirs.reset(index)
    is_same = tally.count(name, begun, ours.reset(index), f"{name} {index} reset", is_first=True)
    told: dict[str, Any] = {"item": index, "steps": []}
    told["reset"] = [digest(settled(name, begun.text, is_first=True)), begun.fault]
    if begun.fault or not is_same:
        return told
    for turn in range(original.turns):
        action = pick(rng, guide, original)
        if name == "sqlgym" and "```sql" in action:  # The client extracts it in this way.
            action = extract(DIALECTS[name], action, Style.AGENTGYM).action
        before = guide.step(action)
        answer = theirs.step(action)
        where = f"{name} {index} {turn} {action!r}"
        is_same = tally.count(name, answer, ours.step(action), where, is_first=False)
        mark = digest(settled(name, answer.text, is_first=False))
        told["steps"].append([action, mark, answer.reward, answer.score, answer.done])
        if answer.done or answer.fault or not is_same or before.done:
            break
    return told


@contextlib.contextmanager
def original_server(
    original: Original, clone: Path, python: str, environ: dict[str, str]
) -> Generator[str]:
    """Start a server of the clone; yield its URL; end it."""
    folder = clone / original.folder
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    env = {**os.environ, **environ, "PYTHONHASHSEED": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder / "lmrlgym")])
    argv = [python, "-c", LAUNCH, original.app, str(port)]
    argv += [str(original.stand_ins)] if original.stand_ins else []
    with subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(port, process)
            yield f"http://127.0.0.1:{port}{original.path}"
        finally:
            process.terminate()


def _wait_for(port: int, process: subprocess.Popen[bytes], *, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    raise SystemExit(f"the original did not start: it ended with {process.poll()}")


def compare(
    name: str,
    clone: Path,
    python: str,
    folder: Path,
    *,
    retriever_url: str,
    has_rules: bool,
    num_items: int,
) -> tuple[Tally, list[dict[str, Any]]]:
    """Play the items of an environment on both servers."""
    original, tally = ORIGINALS[name], Tally()
    recipes = clone / "agentenv-textcraft/agentenv_textcraft/recipes"
    words, asked = str(clone / WORDS), folder / "questions"
    options = EnvsSection(
        agentgym_rules=has_rules,
        textcraft=TextcraftOptions(recipes_dir=str(recipes)),
        sqlgym=SqlgymOptions(bird_dir=str(folder / "bird")),
        wordle=WordleOptions(words=words),
        searchqa=SearchqaOptions(questions_dir=str(asked), retriever_url=retriever_url),
    )
    overrides = [
        f"envs.agentgym_rules={str(has_rules).lower()}",
        f"envs.textcraft.recipes_dir={recipes}",
        f"envs.sqlgym.bird_dir={folder / 'bird'}",
        f"envs.wordle.words={words}",
        f"envs.searchqa.questions_dir={asked}",
        f"envs.searchqa.retriever_url={retriever_url}",
        "envhub.style=agentgym",
    ]
    spec = Registry([name], options).spec(name)
    assert spec.from_agentgym is not None
    guide: Any = spec.make(Style.AGENTGYM)
    environ = {
        "AGENTENV_SQLGYM_BIRD_PATH": str(folder / "bird"),
        "PARITY_QUERIES": str(asked / "queries.json"),
        "PARITY_RETRIEVER": retriever_url,
    }
    transcripts: list[dict[str, Any]] = []
    with (
        original_server(original, clone, python, environ) as url,
        hub_process([name], overrides=overrides) as hub,
    ):
        theirs = Raw(name, url)
        ours = Raw(name, f"{hub.target.url}/agentgym/{name}", hub.target.token or "")
        for index in original.items[:num_items] if num_items else original.items:
            with contextlib.suppress(ValueError):
                guide.reset(spec.from_agentgym(index), 0)
            if told := play(name, theirs, ours, guide, index, tally):
                transcripts.append(told)
        ours.close()
    guide.close()
    return tally, transcripts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agentgym", type=Path, required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--envs", default=",".join(ORIGINALS))
    parser.add_argument("--items", type=int, default=0, help="of each environment; 0: all")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    path = HERE / "transcripts.json"
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    say = sys.stdout.write
    say("| environment | rules | compared | equal | different, by cause |\n")
    say("|---|---|---:|---:|---|\n")
    with tempfile.TemporaryDirectory() as folder, search.retriever() as url:
        write_bird(Path(folder) / "bird")
        search.write_questions(Path(folder) / "questions")
        recipes = given.agentgym / "agentenv-textcraft/agentenv_textcraft/recipes"
        if not recipes.is_dir():
            write_recipes(recipes)
        for name in given.envs.split(","):
            for has_rules in (True, False):
                args = (name, given.agentgym.resolve(), given.python, Path(folder))
                tally, told = compare(
                    *args, retriever_url=url, has_rules=has_rules, num_items=given.items
                )
                causes = ", ".join(f"{cause} {num}" for cause, num in tally.causes.items()) or "-"
                on = "on" if has_rules else "off"
                say(f"| {name} | {on} | {tally.steps} | {tally.equal} | {causes} |\n")
                sys.stdout.flush()
                sys.stderr.write("".join(f"{on} {each}\n" for each in tally.examples))
                if has_rules and given.record:
                    recorded[name] = told
    if given.record:
        path.write_text(
            json.dumps(recorded, separators=(",", ":"), sort_keys=True), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
