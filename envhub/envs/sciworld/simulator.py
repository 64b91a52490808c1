"""ScienceWorld's simulator in a small JVM of its own."""

import json
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError
from scienceworld.constants import BASEPATH, JAR_PATH

from envhub.env import EnvFailure
from envhub.envs.sciworld.catalogue import Variation

logger = logging.getLogger(__name__)

# The simulator lists objects in the order of their identity hashes. These are random unless
# hashCode=2 makes them all equal. Without it, the same episode has different observations each
# time.
JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
EXIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorAnswer:
    """The simulator's answer to one line; `score` is -100 to 100, rounded."""

    observation: str
    score: int
    is_complete: bool


class Simulator:
    """One JVM with one world. Calls must not overlap. Any failure closes it permanently."""

    def __init__(self, *, memory_mib: int, timeout_s: float) -> None:
        """Start the JVM; `timeout_s` is the longest wait for one answer.

        Raises: EnvFailure: Java is missing or does not start.
        """
        if shutil.which("java") is None:
            raise EnvFailure("ScienceWorld's JVM did not start: java is not on the PATH")
        try:
            port, token, self._process = launch_gateway(  # pyright: ignore
                classpath=JAR_PATH,
                cwd=BASEPATH,
                javaopts=[f"-Xmx{memory_mib}m", *JVM_OPTIONS],
                # The JVM also exits if this process is killed, because its pipe closes.
                die_on_exit=True,
                enable_auth=True,
                return_proc=True,
            )
        except (OSError, ValueError, Py4JError) as error:
            raise EnvFailure(f"ScienceWorld's JVM did not start: {error}") from error
        self._gateway = JavaGateway(
            gateway_parameters=GatewayParameters(
                port=port, auth_token=token, auto_field=True, read_timeout=timeout_s
            )
        )
        self.is_alive = True
        self.pid: int = self._process.pid
        try:
            # These names of Java packages are unknown to the type checker.
            package = self._gateway.jvm.scienceworld.runtime.pythonapi  # pyright: ignore
            self._interface = package.PythonInterface()  # pyright: ignore
        except (Py4JError, OSError) as error:
            self.close()
            raise EnvFailure(f"ScienceWorld's JVM failed at its start: {error}") from error
        logger.info("started jvm pid=%d memory_mib=%d", self.pid, memory_mib)

    def load(self, variation: Variation, simplifications: str, *, with_gold: bool = False) -> None:
        """Begin an episode. The variation must exist: the simulator does not check it."""
        self._call("load", variation.task, variation.index, simplifications, with_gold)

    def act(self, line: str) -> SimulatorAnswer:
        """Perform one line of any text."""
        return SimulatorAnswer(
            observation=self._text("step", line),
            score=round(100 * float(self._text("getScore"))),
            is_complete=bool(self._call("getCompleted")),
        )

    def num_moves(self) -> int:
        """Return the number of moves.

        `wait` takes about ten moves. Observing or an invalid action takes none.
        """
        return int(str(self._call("getNumMoves")))

    def possible(self, what: str) -> list[str]:
        """Return the possible "Actions" or "Objects", in the simulator's order."""
        found = self._call(f"getPossible{what}")
        assert isinstance(found, Iterable)
        return [str(each) for each in found]

    def object_tree(self) -> object:
        """Return all objects of the world from the simulator's file, for display.

        Raises: EnvFailure: there is no episode, or no file.
        """
        with TemporaryDirectory() as folder:
            problem = self._text("getObjectTree", folder)
            path = Path(folder) / "objectTree.json"
            if not path.is_file():
                raise EnvFailure(f"ScienceWorld wrote no object tree: {problem}")
            return json.loads(path.read_text(encoding="utf-8"))

    def task_description(self) -> str:
        """Return the sentence that describes the task."""
        return self._text("getTaskDescription").strip()

    def look(self) -> str:
        """Return the room's description; takes no time in the world."""
        return self._text("freeActionLook").strip()

    def inventory(self) -> str:
        """Return the inventory; takes no time in the world."""
        return self._text("freeActionInventory").strip()

    def goal_progress(self) -> str:
        """Return the completed goals of the task, for display."""
        return self._text("getGoalProgressStr").strip()

    def valid_actions_json(self) -> str:
        """Return every executable action as the simulator's JSON; takes tens of milliseconds."""
        return self._text("getValidActionObjectCombinationsJSON")

    def gold_path(self) -> tuple[str, ...]:
        """Return actions that solve the episode, if it was loaded `with_gold`."""
        gold = self._call("getGoldActionSequence")
        assert isinstance(gold, Iterable)
        return tuple(str(action) for action in gold)

    def _text(self, name: str, *arguments: object) -> str:
        """Return the result of a method as text."""
        return str(self._call(name, *arguments))

    def _call(self, name: str, *arguments: object) -> object:
        """Return the result of a method of the simulator. Raises: EnvFailure."""
        if not self.is_alive:
            raise EnvFailure("ScienceWorld's JVM has already been closed")
        try:
            return getattr(self._interface, name)(*arguments)
        except (Py4JError, OSError) as error:
            self.close()
            first_line = str(error).strip().partition("\n")[0]
            raise EnvFailure(f"ScienceWorld's JVM failed in {name}: {first_line}") from error

    def close(self) -> None:
        """Stop the JVM. A second call has no effect."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._gateway.close()
        # Otherwise py4j connects to the ended JVM whenever Python frees one of its objects.
        self._gateway._gateway_client.is_connected = False  # pyright: ignore
        self._process.kill()
        self._process.wait(timeout=EXIT_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        logger.info("ended jvm pid=%d", self.pid)
