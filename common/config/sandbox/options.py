"""Options of the sandbox and of the environments that run programs in it."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.config.knobs import PATH, URL, WORD, Contradiction, knob, seconds

BACKENDS = ("bwrap", "docker", "podman", "remote")
MOST_MIB = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """The sandbox in which the environments `code` and `terminal` run programs."""

    backend: str = knob(
        "bwrap",
        "Selects the sandbox: bubblewrap, containers of Docker or Podman, or a server.",
        one_of=BACKENDS,
    )
    memory_mib: int = knob(
        512, "Limits the memory of all processes of a sandbox, in MiB.", ge=16, le=MOST_MIB
    )
    processes: int = knob(64, "Limits the processes and threads of a sandbox.", ge=4, le=10**5)
    open_files: int = knob(256, "Limits the open files of a process.", ge=16, le=10**6)
    max_files: int = knob(
        20_000, "Limits the files and folders that a sandbox may hold.", ge=100, le=10**8
    )
    file_mib: int = knob(64, "Limits the size of a file, in MiB.", ge=1, le=MOST_MIB)
    disk_mib: int = knob(
        64,
        "Limits the size of the work folder and of /tmp, in MiB. Both are in memory.",
        ge=4,
        le=MOST_MIB,
    )
    cgroups: bool = knob(
        True, "Limits memory and processes with control groups, too, where the hub may create them."
    )
    start_timeout_s: float = seconds(60.0, "Limits the seconds in which a sandbox starts.", gt=0)
    uid: int = knob(
        65534,
        "Sets the user that runs bubblewrap's sandboxes if the hub runs as root.",
        ge=1,
        lt=2**31,
    )
    python: str = knob(
        "", "Names the Python inside of the sandbox. Empty searches the system's folders."
    )
    mounts: list[str] = knob(
        [],
        "Shows more folders of the machine in the sandbox, read-only, as PATH or PATH:TARGET.",
        form=PATH,
    )
    image: str = knob(
        "python:3.12-slim", "Names the image of containers whose task names none. It needs bash."
    )
    url: str = knob("", "Names the URL of the sandbox server.", form=URL, also="")
    token_env: str = knob(
        "SANDBOX_TOKEN",
        "Names the environment variable with the token of the sandbox server.",
        form=WORD,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.backend == "remote" and not self.url:
            yield "url", self.url, "envs.sandbox.backend=remote needs the URL of a server"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """Programming problems with tests. See docs/SANDBOX.md."""

    train: str = knob(
        "configs/data/code/train.jsonl",
        "Names a file of problems in the format of MBPP or HumanEval, for training.",
        form=PATH,
    )
    eval: str = knob(
        "configs/data/code/test.jsonl", "Names a file of held-out problems.", form=PATH, also=""
    )
    reward: str = knob(
        "passed",
        "Rewards an answer that passes all tests, or the share of tests that pass.",
        one_of=("passed", "share"),
    )
    timeout_s: float = seconds(5.0, "Limits the seconds of one test.", gt=0)
    total_timeout_s: float = seconds(60.0, "Limits the seconds of all tests of an answer.", gt=0)
    max_sessions: int = knob(
        16, "Limits the live episodes. Tests run in one sandbox each.", ge=1, le=10_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalOptions:
    """Tasks in a terminal, in the format of Harbor or Terminal-Bench. See docs/SANDBOX.md."""

    train: str = knob(
        "configs/data/terminal", "Names the folder of the training tasks, one folder each."
    )
    eval: str = knob(
        "",
        "Names the folder of the held-out tasks. Without it there is no evaluation.",
        form=PATH,
        also="",
    )
    max_turns: int = knob(20, "Limits the commands of an episode.", ge=1, le=10_000)
    command_timeout_s: float = seconds(30.0, "Limits the seconds of a command.", gt=0)
    test_timeout_s: float = seconds(
        600.0, "Limits the seconds of the tests. A task may set a lower limit.", gt=0
    )
    output_chars: int = knob(
        4000,
        "Limits the output of a command that the agent reads, in characters.",
        ge=100,
        le=10**7,
    )
    keeps_processes: bool = knob(
        False,
        "Keeps the agent's background processes during the tests. They could change the tests.",
    )
    without_network: bool = knob(
        False, "Plays a task that asks for a network (network_mode, allow_internet) without one."
    )
    max_sessions: int = knob(
        16, "Limits the live episodes. Each of them has a sandbox.", ge=1, le=10_000
    )
