"""ScienceWorld: elementary science in a simulated house, with one small JVM per running episode."""

import json
import logging
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError
from scienceworld.constants import BASEPATH, JAR_PATH

from common.config.envs import EnvsSection, SciworldOptions
from envhub.digests import digests_of_packages
from envhub.env import EnvFailure, EnvSpec, Isolation, StepResult, Style, action_text, parse_item
from envhub.envs.sciworld import catalogue
from envhub.envs.sciworld.catalogue import Variation
from envhub.envs.text_env import TextEnv
from envhub.tasks import spec_beside

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
        names = self._call(f"getPossible{what}")
        assert isinstance(names, Iterable)
        return [str(each) for each in names]

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


class Simulators:
    """A pool of the episodes' JVMs.

    Example: an episode takes a JVM at its first reset and returns it on close. The next episode
    loads its own task into it. A failed JVM is not returned to the pool; the next `take` starts a
    new one.
    """

    def __init__(self, options: SciworldOptions) -> None:
        self._options = options
        self._idle: list[Simulator] = []
        self._lock = threading.Lock()

    def take(self) -> Simulator:
        """Return a JVM for exclusive use.

        Raises: EnvFailure: a new one was needed and did not start.
        """
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Simulator(
            memory_mib=self._options.jvm_memory_mib, timeout_s=self._options.call_timeout_s
        )

    def give(self, simulator: Simulator) -> None:
        """Return a JVM to the pool after its episode."""
        if simulator.is_alive:
            with self._lock:
                self._idle.append(simulator)

    def close(self) -> None:
        """Stop the idle JVMs."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for simulator in idle:
            simulator.close()


class GoldPaths:
    """Solutions by variation, computed in a separate JVM, which needs far more memory.

    That JVM starts with the first request and runs until `rest`.
    """

    MAX_KEPT = 1000

    def __init__(self, options: SciworldOptions) -> None:
        self._options = options
        self._kept: OrderedDict[Variation, tuple[str, ...]] = OrderedDict()
        self._solver: Simulator | None = None
        self._lock = threading.Lock()

    def find(self, variation: Variation) -> tuple[str, ...]:
        """Return the actions that solve a variation; takes half a second on average.

        Raises: EnvFailure: the JVM failed.
        """
        with self._lock:
            if variation not in self._kept:
                self._kept[variation] = self._solve(variation)
                if len(self._kept) > self.MAX_KEPT:
                    self._kept.popitem(last=False)
            return self._kept[variation]

    def _solve(self, variation: Variation) -> tuple[str, ...]:
        """Return the gold path of a variation, from the JVM for solutions."""
        if self._solver is None or not self._solver.is_alive:
            self._solver = Simulator(
                memory_mib=self._options.gold_memory_mib, timeout_s=self._options.call_timeout_s
            )
        self._solver.load(variation, self._options.simplifications, with_gold=True)
        return self._solver.gold_path()

    def rest(self) -> None:
        """Stop the JVM to free its memory; found solutions are kept."""
        with self._lock:
            if self._solver is not None:
                self._solver.close()
                self._solver = None


class Machines:
    """The resources shared by all episodes of a process; no JVM runs before the first reset."""

    def __init__(self, options: SciworldOptions) -> None:
        self.simplifications = options.simplifications
        self.simulators = Simulators(options)
        self.gold = GoldPaths(options)

    async def stop(self) -> None:
        """Stop the JVMs that no episode uses."""
        self.simulators.close()
        self.gold.rest()


MAX_ACTION_CHARS = 300
NOT_UNDERSTOOD = ("No known action matches that input.", "Unknown action.")
AMBIGUOUS = "Ambiguous request:"

CHOICE = re.compile(r"^([0-9]+):", re.MULTILINE)
ROOM = re.compile(r"This .*?is called the (.+?)\. .*?you see:")
DOOR_STATE = re.compile(r"\(that is (open|closed)\)")
# A capital article occurs only at the start of a line. Elsewhere "A" is a name, as of a substance.
ARTICLE = re.compile(r"\ban? |^\s*An? ", re.MULTILINE)
OMITTED = frozenset({"the agent", "air"})  # These objects are in every room.


def one_line(text: str) -> str:
    """Return an action in the simulator's input format: printable ASCII, single spaces, bounded."""
    printable = "".join(c if " " <= c <= "~" else " " for c in text)
    return " ".join(printable.split())[:MAX_ACTION_CHARS].strip()


def plain_action(action: str) -> str:
    """Return an action without the capitals and full stops that small models add."""
    return action.lower().rstrip(" .!")


def was_understood(observation: str) -> bool:
    """Return False if the simulator found no action in the text."""
    return not observation.startswith(NOT_UNDERSTOOD)


def listed_choices(observation: str) -> tuple[str, ...]:
    """Return the numbers that an ambiguous request offers; () for other observations."""
    return tuple(CHOICE.findall(observation)) if observation.startswith(AMBIGUOUS) else ()


def compact_text(observation: str) -> str:
    """Return an observation in fewer words, on one line."""
    if observation.startswith(AMBIGUOUS):
        return "which number? " + _listed(observation.splitlines()[1:])
    if not was_understood(observation):
        return "invalid action"
    text = observation.replace("In your inventory, you see:", "you hold:")
    text = ROOM.sub(r"\1:", text).replace("You also see:", "ways:")
    text = ARTICLE.sub("", text.replace("a substance called ", ""))
    text = DOOR_STATE.sub(r"\1", text)
    lines = [line for line in text.splitlines() if line.strip() not in OMITTED]
    return _listed(lines)


def _listed(lines: list[str]) -> str:
    """Return lines joined by semicolons, or by a space after a line that ends with a colon."""
    joined = ""
    for line in lines:
        words = " ".join(line.split()).rstrip(",.")
        if words:
            joined += f" {words}" if joined.endswith(":") else f"; {words}"
    return joined.removeprefix("; ")


# Memory of a worker beyond the JVM heaps: its process, its JVM, and the JVM of the gold paths.
OVERHEAD_MIB = 700
# Maximum number of the simulator's moves; AgentGym ends an episode with the next one.
MAX_MOVES = 100
NUM_SHOWN = 10  # Number of actions and objects on AgentGym's page.
# Actions without effect, which keep the expert on its path.
FREE_ACTIONS = frozenset({"look around", "inventory", "task", "objects", "help", ""})


class SciWorldEnv(TextEnv):
    """One ScienceWorld episode.

    The reward of a step is the current score, 0 to 1. A wrong `focus on` ends the episode with 0.
    The episode ends after `max_turns` actions of any kind. AgentGym's rules differ: the episode
    ends with the first action after more than 100 of the simulator's moves. `wait` takes ten moves;
    observing takes none. AgentGym's clients then get the score -100 for a wrong focus.
    """

    def __init__(self, style: Style, machines: Machines, *, has_rules: bool = False) -> None:
        super().__init__(style)
        self._machines = machines
        self._has_rules = has_rules
        self._simulator: Simulator | None = None

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines everything."""
        item = parse_item(item_id, catalogue.SUBSETS)
        self._variation = catalogue.variation_of(item)
        self._max_turns = catalogue.SUBSETS[item.subset].max_turns
        if self._simulator is None:
            self._simulator = self._machines.simulators.take()
        self._simulator.load(self._variation, self._machines.simplifications)
        self._begin()
        self._num_turns = 0
        self._choices: tuple[str, ...] = ()
        self._gold: tuple[str, ...] | None = None
        self._performed: list[tuple[str, bool]] = []
        task = self._simulator.task_description()
        # Before its first step, the simulator reports score and end of the last episode.
        self._outcome = self._simulator.act("look around")
        room = self._outcome.observation.strip()
        self._at_start = (self._variation, task, room, self._simulator.inventory())
        if self._is_compact:
            return f"{task}\n{compact_text(room)}"
        return f"{task}\n{room}"

    def _step(self, action: str) -> StepResult:
        """Perform one line of text in the simulator, and describe the result."""
        simulator = self._live()
        line = one_line(action_text(action))
        if self._is_compact:
            line = plain_action(line)
            if self._choices and line not in self._choices:
                simulator.act("")  # Cancel the open question, which would consume this action.
        outcome = self._outcome = simulator.act(line)
        is_understood = was_understood(outcome.observation)
        self._choices = listed_choices(outcome.observation)
        self._num_turns += 1
        self._performed.append((line, is_understood))
        is_solved = outcome.score >= 100 and not self._has_rules
        is_over = outcome.is_complete or outcome.score < 0 or is_solved
        self._done = is_over or self._is_spent()
        return StepResult(
            observation=self._worded(outcome.observation),
            reward=min(max(outcome.score, 0), 100) / 100,
            done=self._done,
            is_valid=is_understood,
            is_success=self._done and outcome.score >= 100,
            is_truncated=self._done and not is_over,
            score=outcome.score if self._has_rules else None,
        )

    def _is_spent(self) -> bool:
        """Return whether the turns are used up, or with AgentGym's rules the moves."""
        if self._has_rules:
            return self._live().num_moves() > MAX_MOVES
        return self._num_turns >= self._max_turns

    def detail(self, what: str) -> object:
        """Return the data for the routes of AgentGym's page and reset."""
        simulator = self._live()
        if what == "score":
            return self._outcome.score
        if what == "goals":
            return simulator.goal_progress()
        if what == "task_description":
            return simulator.task_description()
        if what == "object_tree":
            return simulator.object_tree()
        if what == "action_hint":
            return {
                "possible_actions": simulator.possible("Actions"),
                "possible_objects": simulator.possible("Objects"),
            }
        if what == "picture":
            titles = ("Task", "Room", "Inventory", "Goals")
            return {"parts": [*zip(titles, self.render().split("\n\n"), strict=False)]}
        if what != "state":
            return None
        return {
            "observation": simulator.look(),
            "inventory": simulator.inventory(),
            "task_description": simulator.task_description(),
            "goal_progress": simulator.goal_progress(),
            "possible_actions": simulator.possible("Actions")[:NUM_SHOWN],
            "possible_objects": simulator.possible("Objects")[:NUM_SHOWN],
            "current_moves": simulator.num_moves(),
        }

    def _worded(self, observation: str) -> str:
        """Return an observation in the style of the episode."""
        return compact_text(observation) if self._is_compact else observation

    def _live(self) -> Simulator:
        """Return the simulator of the running episode."""
        assert self._simulator is not None, "an episode is used before its reset"
        return self._simulator

    def _valid_actions(self) -> list[str]:
        """Return every executable action, sorted: up to thousands, within 50 ms to 300 ms."""
        if self._choices:
            return list(self._choices)
        combinations = json.loads(self._live().valid_actions_json())["validActions"]
        return sorted({combination["action"] for combination in combinations})

    def _expert_action(self) -> str | None:
        """Return the next action of the gold path; None once the episode has left the path.

        A step that the simulator rejects counts as followed. Some gold paths use terminals that an
        object does not have, and still reach the goal.
        """
        if self._gold is None:
            self._gold = self._machines.gold.find(self._variation)
        gold = self._gold
        num_followed = 0
        for action, is_understood in self._performed:
            is_next = num_followed < len(gold) and action.lower() == gold[num_followed].lower()
            if is_next:
                num_followed += 1
            elif is_understood and action not in FREE_ACTIONS:
                return None
        return gold[num_followed] if num_followed < len(gold) else None

    def render(self) -> str:
        """Return the task, the room, the inventory and the completed goals."""
        if self._simulator is None:
            return ""
        parts = (
            self._simulator.task_description(),
            self._simulator.look(),
            self._simulator.inventory(),
            self._simulator.goal_progress(),
        )
        return "\n\n".join(parts)

    def _state(self) -> str:
        return repr(self._at_start)

    def close(self) -> None:
        """Return the JVM to the pool."""
        if self._simulator is not None:
            simulator = self._simulator
            self._simulator = None
            if self._gold is None:
                self._machines.gold.rest()  # No further demonstrations: free the memory of its JVM.
            self._machines.simulators.give(simulator)
        self._done = True


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return ScienceWorld's catalogue entry."""
    chosen = options.sciworld
    machines = Machines(chosen)
    memory_mib = chosen.jvm_memory_mib + chosen.gold_memory_mib + OVERHEAD_MIB
    return spec_beside(
        __file__,
        catalogue.SUBSETS,
        lambda style: SciWorldEnv(style, machines, has_rules=options.agentgym_rules),
        isolation=Isolation.WORKER,
        sessions_per_worker=1,
        max_workers=chosen.max_jvms,
        sessions_key="envs.sciworld.max_jvms",
        worker_memory_bytes=memory_mib << 20,
        step_timeout_s=chosen.call_timeout_s,
        from_agentgym=catalogue.from_agentgym,
        column_item=catalogue.column_item,
        stop=machines.stop,
        content=digests_of_packages("scienceworld"),
    )


def check(options: EnvsSection) -> list[str]:
    """Return a line for each missing requirement of this machine, with its remedy."""
    missing = []
    if find_spec("scienceworld") is None:
        missing.append(
            "sciworld needs the package scienceworld: pip install scienceworld (the extra `envs`)"
        )
    if shutil.which("java") is None:
        missing.append("sciworld needs Java: apt install default-jre-headless")
    allowed = catalogue.SIMPLIFICATIONS
    wanted = options.sciworld.simplifications.split(",")
    if unknown := sorted({*filter(None, wanted)} - allowed):
        names = ", ".join(sorted(allowed))
        missing.append(f"envs.sciworld.simplifications: {unknown} must be among {names}")
    return missing
