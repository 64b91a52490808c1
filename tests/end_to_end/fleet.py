"""A run without engines and gradients: real roles, with an intake, and clocks for engines.

`python -m tests.end_to_end.fleet` has imported what the roles need and forks one for each line that
it reads, a JSON list [role, its arguments, network namespace]; it answers with the process id.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from common.config.load import load_config
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.security import create_keys
from learner.journal.journal import read_journal
from tests.end_to_end.nodes import Node
from tests.end_to_end.runs import balances
from tests.end_to_end.simulated_actor import MAX_TOKENS, MIN_TOKENS
from tests.processes import is_gone

NEW_NETWORK = 0x40000000  # CLONE_NEWNET of Linux
WAIT_S = 120.0
TOKEN_S = 0.006  # of a clock: an episode of four turns takes some two seconds
HORIZON = 4


class Fleet:
    """The roles of one run; those on nodes have no disk of it but their own folder."""

    def __init__(self, folder: Path, *overrides: str, horizon: int = HORIZON) -> None:
        settings = (
            *(f"run.dir={folder}", "run.name=r", "train.num_steps=1000000", "log.level=INFO"),
            *("eval.before=false", "eval.after=false", "algorithm.filter_zero_variance=false"),
            *("horizon.kind=fixed", f"horizon.stages=[{horizon}]", "scheduler.gate_margin=0"),
            *("scheduler.host=0.0.0.0", "learner.host=0.0.0.0", "envhub.host=0.0.0.0"),
        )
        self.run_dir = RunDir(root=folder / "r")
        create_keys(self.run_dir.keys)
        cfg = load_config("quickstart", [*settings, *overrides])
        save_config(cfg, self.run_dir.config)
        self._folder = folder
        self._log = (folder / "fleet.log").open("ab")
        self._forks = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.fleet"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        where = [f"run.dir={folder}", "run.name=r"]
        self.hub = subprocess.Popen(
            [sys.executable, "run.py", "envhub", *where],
            cwd=ROOT,
            stdout=self._log,
            stderr=self._log,
        )
        self.roles: dict[str, psutil.Process] = {"envhub": psutil.Process(self.hub.pid)}
        self.learner_dir = self.run_dir
        self.nodes: dict[str, Node] = {}

    def start(self, name: str, role: str, *arguments: Any, node: Node | None = None) -> None:
        """Fork a role, in a node's network if there is one."""
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(json.dumps([role, arguments, node.name if node else ""]) + "\n")
        self._forks.stdin.flush()
        answer = self._forks.stdout.readline()
        assert answer, self.said
        self.roles[name] = psutil.Process(int(answer))

    def start_centre(self, *, node: Node | None = None, host: str = "") -> None:
        """Start the scheduler and the learner's intake, that one on a node if there is one."""
        self.start("scheduler", "scheduler", str(self.run_dir.root))
        address = self.run_dir.addresses / "scheduler"
        self.wait_until(address.exists)
        if node is not None:
            self.learner_dir = RunDir(root=self._copy(node, host))
        self.start("learner", "learner", str(self.learner_dir.root), node=node)

    def add(
        self,
        number: int,
        slots: int,
        *,
        node: Node | None = None,
        host: str = "",
        token_s: float = TOKEN_S,
        lengths: Sequence[int] = (MIN_TOKENS, MAX_TOKENS),
        url: str = "",
    ) -> None:
        """Start an actor.

        Args:
            lengths: least and most tokens of a simulated turn.
            url: the address of a shared engine; "": a simulated one.
        """
        folder = self.run_dir.root if node is None else self._copy(node, host)
        least, most = lengths
        arguments = map(str, (folder, number, slots, token_s, least, most, url))
        self.start(f"actor-{number}", "actor", *arguments, node=node)

    def _copy(self, node: Node, host: str) -> Path:
        """Give a node a folder with the run's configuration, keys and address."""
        folder = node.folder
        folder.mkdir()
        shutil.copy(self.run_dir.config, folder)
        shutil.copytree(self.run_dir.keys, folder / "keys")
        port = (self.run_dir.addresses / "scheduler").read_text(encoding="utf-8").rpartition(":")[2]
        RunDir(root=folder).publish_address("scheduler", f"tcp://{host}:{port}")
        return folder

    @property
    def scheduler_port(self) -> int:
        return int(
            (self.run_dir.addresses / "scheduler").read_text(encoding="utf-8").rpartition(":")[2]
        )

    def wait_until(self, happened: Callable[[], object], *, timeout_s: float = WAIT_S) -> float:
        """Wait for an event while all roles are alive; return the seconds."""
        started = time.monotonic()
        while not happened():
            assert self.dead() == [], self.said
            assert time.monotonic() - started < timeout_s, self.said
            time.sleep(0.05)
        return time.monotonic() - started

    def dead(self) -> list[str]:
        return [n for n, p in self.roles.items() if is_gone(p.pid)]

    @property
    def said(self) -> str:
        return (self._folder / "fleet.log").read_text(errors="replace", encoding="utf-8")[-6_000:]

    def ledger(self) -> dict[str, Any]:
        """The scheduler's books, written at each step."""
        with suppress(FileNotFoundError):
            return json.loads(self.run_dir.ledger.read_text(encoding="utf-8"))
        return {"version": -1, "issued": 0, "trained": 0, "failed": 0, "reissued": 0}

    def finished(self) -> Counter[str]:
        """Episodes in the journal by actor."""
        return Counter(t.actor for _, t in read_journal(self.learner_dir.journal))

    def worked_s(self) -> dict[str, float]:
        """Seconds of the engine's slots for the episodes in the journal, by actor."""
        worked = defaultdict[str, float](float)
        for _, trajectory in read_journal(self.learner_dir.journal):
            worked[trajectory.actor] += trajectory.generate_s
        return worked

    def check_books(self) -> None:
        """Nothing lost, nothing twice, no failure of the machinery."""
        ledger = self.ledger()
        assert balances(ledger), ledger
        assert ledger["failed"] == ledger["unknown_reports"] == 0, ledger
        ids = [t.episode_id for _, t in read_journal(self.learner_dir.journal)]
        assert len(set(ids)) == len(ids)
        ends = {t.end_reason for _, t in read_journal(self.learner_dir.journal)}
        assert not [end for end in ends if end.is_infrastructure_failure]

    def close(self) -> None:
        """End all roles, by process id."""
        for process in self.roles.values():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.close()
        self._forks.kill()
        for process in (self._forks, self.hub):
            process.wait(30)
        self._forks.stdout.close()
        self._log.close()


def be(role: str, arguments: list[Any], namespace: str) -> None:
    """Be a role, in a network of its own if one is named."""
    from benchmarks import transport
    from scheduler import main as scheduler
    from tests.end_to_end import simulated_actor

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if namespace:
        with open(f"/run/netns/{namespace}", encoding="utf-8") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), NEW_NETWORK) == 0
    run_dir = RunDir(root=Path(arguments[0]))
    if role == "actor":
        simulated_actor.main(*arguments)
    elif role == "learner":
        transport.take_in(run_dir.root)
    else:
        scheduler.run(load_config(str(run_dir.config), []), run_dir)


def main() -> None:
    import tests.end_to_end.simulated_actor  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # No exit status is collected.
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            with ExitStack() as stack:
                stack.callback(os._exit, 1)
                stack.callback(sys.stderr.flush)
                with suppress(SystemExit):
                    stack.callback(lambda: traceback.print_exc())
                    be(*order)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
