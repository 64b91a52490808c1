"""Tasks in a terminal: the agent runs commands in a sandbox, and tests decide at the end."""

import asyncio
import errno
import hashlib
import io
import itertools
import logging
import math
import os
import posixpath
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.config.envs import EnvsSection, TerminalOptions
from common.errors import ConfigError
from envhub.env import EnvFailure, EnvSpec, Isolation, StepResult, Style, SubsetSpec, parse_item
from envhub.envs.terminal.image import TaskFile
from envhub.envs.terminal.task_sets import find_task_set, load_task_set
from envhub.envs.terminal.tasks import TerminalTask, digest_of_tasks
from envhub.envs.terminal.texts import (
    CLEAR,
    CLEAR_CONTAINER,
    CLEAR_REWARD,
    NO_COMMAND,
    OPEN_CONTAINER,
    SHELL,
    VERIFIER,
    action_of,
    command_of,
    describe,
    reward_of,
)
from envhub.sandbox.backends import (
    container_limits_of,
    has_containers,
    limits_of,
    make_backend,
    worker_bytes,
)
from envhub.sandbox.interface import (
    EVERY_HOST,
    TESTS,
    AllowedHosts,
    CommandEnd,
    CommandResult,
    RefusedBySandbox,
    Sandbox,
    SandboxBackend,
    SandboxFile,
    SandboxLimits,
    SandboxRequest,
)
from envhub.sandbox.process import agent_text, confining_script

logger = logging.getLogger(__name__)

SUBSET = "tasks"
SUBMIT = "submit"
REWARDS = (f"{VERIFIER}/reward.json", f"{VERIFIER}/reward.txt")  # In the order of Harbor.
REWARD_WORD = b"reward"  # Part of these names.
# The tests run the agent's programs with the script that this variable names.
AS_AGENT = "AS_AGENT"
AS_AGENT_PATH = f"{TESTS}/.as-agent"
AS_AGENT_CODE = f"{TESTS}/.as-agent.py"
MISSING = os.strerror(errno.ENOENT)
MAX_REWARD_BYTES = 100_000
MAX_OUTPUT_BYTES = 64_000
MAX_ARTIFACT_BYTES = 64 << 20
CLEAR_TIMEOUT_S = 60.0
PACK_TIMEOUT_S = 120.0
PACKED = "/tmp/.artifacts.tar"
# Packs the paths that exist. A link in place of an artifact is packed as a link, which is no file.
# Exit code 1 of GNU tar: a process of the agent has changed a file meanwhile, such as a log.
PACK = f"""
rm -rf {PACKED}; n=$#
for path; do [ -e "$path" ] && set -- "$@" ".$path"; done
shift "$n"; [ $# -gt 0 ] || set -- -T /dev/null
tar -C / -cf {PACKED} "$@" || [ $? -eq 1 ]
"""
SETUP_TIMEOUT_S = 120.0
ROOT = "0"  # The user of a container that makes the folders of tests and logs.
MARGIN_S = 240.0  # Seconds of a step beyond its commands: start, files and end of the sandbox.
NOT_RUN = (126, 127)  # Exit codes of a shell whose command does not exist or cannot run.
# Runs a command in a folder, or in the sandbox's folder if the agent has removed it.
IN_FOLDER = ("bash", "-c", 'cd "$1" 2>/dev/null; shift; exec "$@"', "bash")
# The tests do not load packages that the agent has installed for its user.
GUARDED = {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
INSTRUCTION = (
    "You work in a Linux terminal {network}. Each answer is one shell command, in a ```bash"
    f" block or as plain text. Answer {SUBMIT} when the task is finished."
)


class UndecidedTests(Exception):
    """The tests did not decide: they could not run, or their reward cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTasks:
    """Everything that the episodes share.

    Attributes:
        tasks: the tasks by split.
        limits, container_limits: limits of sandboxes, and of containers of tasks.
        opening_s: the most seconds in which the images of a task are made and started.
        decided: whether the tests of a task decide without an agent, by the task's name. Tests
            that reach a network are not here: they may depend on a server that is away later.
    """

    tasks: dict[str, list[TerminalTask]]
    options: TerminalOptions
    limits: SandboxLimits
    container_limits: SandboxLimits
    backend: SandboxBackend
    opening_s: float
    decided: dict[str, bool] = field(default_factory=dict)

    @property
    def subsets(self) -> dict[str, SubsetSpec]:
        """The only subset with its sizes."""
        sizes = {split: len(each) for split, each in self.tasks.items()}
        turns = self.options.max_turns
        spec = SubsetSpec(num_train=sizes["train"], num_test=sizes["test"], max_turns=turns)
        return {SUBSET: spec}

    @property
    def instruction(self) -> str:
        """The instruction of all tasks; "" if it is a part of their first observations."""
        tasks = itertools.chain(*self.tasks.values())
        return "" if any(task.agent_hosts for task in tasks) else instruction_of(())

    def opening(self, task: TerminalTask, work: str) -> str:
        """Return the first observation of a task, with its instruction if tasks differ in it."""
        before = "" if self.instruction else f"{instruction_of(task.agent_hosts)}\n\n"
        return f"{before}{task.instruction}\n\nThe work folder is {work}."

    @property
    def longest_s(self) -> float:
        """The most seconds of a step: a command and the tests, and both again without an agent."""
        tests_s = self.options.command_timeout_s + self.options.test_timeout_s + MARGIN_S
        if any(task.verifier for task in itertools.chain(*self.tasks.values())):
            tests_s += self.opening_s
        return max(2 * tests_s, self.opening_s)


class TerminalEnv:
    """One task in its own sandbox.

    Example: the agent runs commands until it answers `submit`, or until its turns or its time are
    over. Then its processes end, the tests are written into `/tests`, and their result is the
    reward.
    """

    def __init__(self, shared: TerminalTasks) -> None:
        self._shared = shared
        self._task: TerminalTask | None = None
        self._sandbox: Sandbox | None = None
        self._num_turns = 0
        self._used_s = 0.0  # Seconds of all commands.
        self._work = ""  # Directory in which commands start.
        self._allowed: AllowedHosts | None = None

    async def reset(self, item_id: str, seed: int) -> str:
        """Return the instruction of an item. Raises: UnknownItem, SandboxFailed."""
        item = parse_item(item_id, self._shared.subsets)
        await self.close()
        task = self._shared.tasks[item.split][item.index]
        await self._open(task)
        return self._shared.opening(task, self._work)

    async def _open(self, task: TerminalTask) -> None:
        """Create a sandbox with the initial files of a task. Raises: EnvFailure."""
        self._task = task
        self._num_turns = 0
        self._used_s = 0.0
        self._allowed = None if task.allowed is None else AllowedHosts(task.allowed[0])
        request = SandboxRequest(
            limits=self._limits_of(task),
            folder=task.folder,
            image=task.image,
            container=task.container,
            services=task.services,
            has_network=task.has_network,
            allowed=self._allowed,
        )
        try:
            try:
                self._sandbox = await self._shared.backend.create(request)
            except EnvFailure as error:
                raise EnvFailure(f"task {task.name}: {error}") from error
            self._work = task.work or self._sandbox.folder
            await self._put(task.files)
            await self._prepare(task)
            self._permit(task, 1)
        except RefusedBySandbox as error:
            raise EnvFailure(f"task {task.name} does not fit into the sandbox: {error}") from error

    def _permit(self, task: TerminalTask, phase: int) -> None:
        """Give the sandbox the hosts of the agent (1) or of the tests (2), if they differ."""
        hosts = task.allowed
        if self._allowed is not None and hosts is not None and hosts[phase] != hosts[phase - 1]:
            self._allowed.change(hosts[phase])

    def _limits_of(self, task: TerminalTask) -> SandboxLimits:
        """Return the limits of a task's sandbox. Its own ones replace those of containers."""
        if task.container is None:
            return _lowered(self._shared.limits, task)
        limits = self._shared.container_limits
        return replace(
            limits,
            memory_bytes=task.memory_bytes or limits.memory_bytes,
            disk_bytes=task.disk_bytes or limits.disk_bytes,
        )

    async def _prepare(self, task: TerminalTask) -> None:
        """Make the work folder and wait until the task is healthy.

        Raises: EnvFailure, RefusedBySandbox.
        """
        assert self._sandbox is not None
        has_root = task.container is not None
        script = 'mkdir -p "$1"' + OPEN_CONTAINER * has_root
        argv = ["bash", "-c", script, "bash", self._work]
        try:
            made = await self._run(argv, CLEAR_TIMEOUT_S, user=ROOT * has_root)
        except (EnvFailure, RefusedBySandbox) as error:
            where = f"task {task.name}" + f", image {task.image}" * bool(task.image)
            raise EnvFailure(f"{where}: {error}; commands need bash") from error
        if not made.is_ok:
            remedy = "; commands need bash" * (made.exit_code in NOT_RUN)
            raise EnvFailure(
                f"task {task.name}: {self._work} cannot be made: {made.text.strip()[-300:]}{remedy}"
            )
        if task.setup:
            argv = [*IN_FOLDER, self._work, "bash", "-c", task.setup]
            done = await self._run(argv, SETUP_TIMEOUT_S, task.variables)
            if not done.is_ok:
                raise EnvFailure(f"task {task.name}: its setup failed: {done.text.strip()[-300:]}")
        check = task.healthcheck
        if check is None:
            return
        began_s = time.monotonic()
        num_failed = 0
        while True:
            argv = [*IN_FOLDER, self._work, *check.argv]
            result = await self._run(argv, check.timeout_sec, task.variables, keeps_processes=True)
            if result.is_ok:
                return
            is_starting = time.monotonic() - began_s < check.start_period_sec
            num_failed += not is_starting
            if num_failed >= check.retries:
                output = result.text.strip()[-300:]
                raise EnvFailure(
                    f"task {task.name}: environment.healthcheck failed {num_failed} times: {output}"
                )
            await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)

    async def step(self, action: str) -> StepResult:
        """Run a command, or end the episode with its tests. Raises: EnvFailure."""
        if self._sandbox is None or self._task is None:
            raise RuntimeError("step before reset, or after the episode has ended")
        self._num_turns += 1
        command = command_of(action)
        is_submitted = command == SUBMIT
        output = "" if is_submitted else await self._shell(command)
        is_valid = output is not None
        limit_s = self._task.agent_timeout_s or math.inf
        is_over = self._num_turns >= self._shared.options.max_turns or self._used_s >= limit_s
        if not is_submitted and not is_over:
            return StepResult(
                observation=output if output is not None else NO_COMMAND,
                reward=0.0,
                done=False,
                is_valid=is_valid,
            )
        reward, note = await self._test()
        await self.close()
        observation = f"{output}\n{note}" if output else note
        return StepResult(
            observation=observation,
            reward=reward,
            done=True,
            is_valid=is_valid,
            metrics={
                "commands": float(self._num_turns),
                "commands_s": self._used_s,
                # The tests decide at a limit, too: the reward is final, so this is no truncation.
                "at_limit": float(not is_submitted),
            },
        )

    async def _shell(self, command: str) -> str | None:
        """Return the output of a command as the agent reads it; None: it is no command."""
        assert self._sandbox is not None
        assert self._task is not None
        options = self._shared.options
        if not command.strip():
            return None
        limit_s = options.command_timeout_s
        if self._task.agent_timeout_s is not None:
            limit_s = min(limit_s, max(0.1, self._task.agent_timeout_s - self._used_s))
        try:
            result = await self._sandbox.exec(
                ["bash", "--noprofile", "--norc", "-c", SHELL, "shell", command, self._work],
                timeout_s=limit_s,
                max_output_bytes=MAX_OUTPUT_BYTES,
                variables=self._task.variables,
                keeps_processes=True,
                user=self._task.agent_user,
            )
        except RefusedBySandbox as error:
            return f"The command could not start: {error}"
        self._used_s += result.seconds
        return describe(result, limit_s, options.output_chars)

    async def _test(self) -> tuple[float, str]:
        """Return the reward of the tests and a remark. Raises: EnvFailure.

        Tests that do not decide give 0 if they decide without the agent.
        """
        assert self._task is not None
        task = self._task
        try:
            return await self._decision(task)
        except UndecidedTests as error:
            is_decided = self._shared.decided.get(task.name)
            if is_decided is None:
                is_decided = await self._decides_without_agent(task)
                if not task.tests_reach_network:
                    self._shared.decided[task.name] = is_decided
            if not is_decided:
                raise EnvFailure(f"task {task.name}: {error}") from error
            logger.warning("tests did not decide, reward is 0 task=%s reason=%s", task.name, error)
            return 0.0, f"The tests failed: {error}"

    async def _decides_without_agent(self, task: TerminalTask) -> bool:
        """Return whether the tests decide about the reference solution in a new sandbox.

        Without a solution, about the initial files. Raises: EnvFailure.
        """
        fresh = TerminalEnv(self._shared)
        try:
            await fresh._open(task)
            if task.solution is not None:
                await fresh._shell(task.solution)
            await fresh._decision(task)
        except UndecidedTests:
            return False
        finally:
            await fresh.close()
        return True

    async def _decision(self, task: TerminalTask) -> tuple[float, str]:
        """Return the reward of the tests and a remark. Raises: UndecidedTests, EnvFailure."""
        assert self._sandbox is not None
        if task.verifier is not None:
            return await self._separate_decision(task.verifier, task.artifacts)
        # Published tasks of containers test the servers that the agent has started.
        if task.container is None and not self._shared.options.keeps_processes:
            await self._sandbox.kill()
        self._permit(task, 2)
        try:
            variables = await self._put_tests(task)
            limit_s = min(task.test_timeout_s or math.inf, self._shared.options.test_timeout_s)
            argv = [*IN_FOLDER, self._work, *task.command]
            result = await self._run(argv, limit_s, variables, user=task.test_user)
        except RefusedBySandbox as error:
            raise UndecidedTests(f"the tests cannot start: {error}") from error
        return await self._verdict(task, result)

    async def _separate_decision(
        self, verifier: TerminalTask, artifacts: Sequence[str]
    ) -> tuple[float, str]:
        """Return the reward of tests in a container of their own, and a remark.

        The container has the artifacts of the agent's container, which ends first.

        Raises: UndecidedTests, EnvFailure.
        """
        files = await self._read_artifacts(artifacts)
        await self.close()
        tests = TerminalEnv(self._shared)
        try:
            await tests._open(verifier)
            assert tests._sandbox is not None
            if files:
                try:
                    await tests._sandbox.write_all(files)
                except RefusedBySandbox as error:
                    raise UndecidedTests(f"the artifacts cannot be written: {error}") from error
            return await tests._decision(verifier)
        finally:
            await tests.close()

    async def _read_artifacts(self, paths: Sequence[str]) -> list[SandboxFile]:
        """Return the regular files at paths. Raises: UndecidedTests: the agent's tar fails."""
        assert self._sandbox is not None
        argv = ["sh", "-c", PACK, "sh", *paths]
        try:
            packed = await self._run(argv, PACK_TIMEOUT_S, user=ROOT)
            if not packed.is_ok:
                raise UndecidedTests(f"the artifacts are unreadable: {packed.text.strip()[-300:]}")
            content = await self._sandbox.read(PACKED, max_bytes=MAX_ARTIFACT_BYTES)
        except RefusedBySandbox as error:
            raise UndecidedTests(f"the artifacts are unreadable: {error}") from error
        try:
            return files_of_archive(content, paths)
        except (tarfile.TarError, ValueError, EOFError, KeyError) as error:
            raise UndecidedTests(f"the artifacts are no archive: {error}") from error

    async def _put_tests(self, task: TerminalTask) -> dict[str, str]:
        """Write the tests, and return their variables. Raises: UndecidedTests, RefusedBySandbox."""
        has_root = task.container is not None
        script = CLEAR_CONTAINER if has_root else CLEAR
        script = CLEAR_REWARD if task.has_tests else script
        cleared = await self._run(["bash", "-c", script], CLEAR_TIMEOUT_S, user=ROOT * has_root)
        if not cleared.is_ok:
            raise UndecidedTests(f"{TESTS} cannot be cleared: {cleared.text.strip()[-300:]}")
        if task.needs_pytest:
            probe = await self._run(["python3", "-I", "-c", "import pytest"], 120.0)
            if not probe.is_ok:
                raise UndecidedTests(
                    "the tests need pytest, which the sandbox's Python lacks; run apt-get install"
                    " python3-pytest, or add its folder to envs.sandbox.mounts"
                )
        variables = {**task.variables, **GUARDED, "TEST_DIR": TESTS, **task.test_variables}
        await self._put(() if task.has_tests else task.tests)
        if _mentions(AS_AGENT.encode(), task.tests):
            variables |= await self._put_as_agent(task)
        return variables

    async def _put_as_agent(self, task: TerminalTask) -> dict[str, str]:
        """Write the script that runs the agent's programs, and return its variable.

        Raises: UndecidedTests: the kernel cannot run programs without rights. RefusedBySandbox.
        """
        assert self._sandbox is not None
        script = confining_script(AS_AGENT_CODE, {AS_AGENT, "TEST_DIR", *task.test_variables})
        await self._sandbox.write(AS_AGENT_CODE, agent_text().encode())
        await self._sandbox.write(AS_AGENT_PATH, script.encode(), mode=0o755)
        probe = await self._run([AS_AGENT_PATH, "true"], CLEAR_TIMEOUT_S, user=task.test_user)
        if not probe.is_ok and task.container is not None:
            logger.warning(
                "tests run the agent's programs with their own rights task=%s reason=%s",
                task.name,
                probe.text.strip()[-300:],
            )
            return {}
        if not probe.is_ok:
            raise UndecidedTests(
                f"the tests run programs of the agent without rights: {probe.text.strip()[-300:]}"
            )
        return {AS_AGENT: AS_AGENT_PATH}

    async def _run(
        self,
        argv: Sequence[str],
        limit_s: float,
        variables: Mapping[str, str] | None = None,
        *,
        keeps_processes: bool = False,
        user: str = "",
    ) -> CommandResult:
        """Return the result of a command of the environment itself. Raises: RefusedBySandbox."""
        assert self._sandbox is not None
        return await self._sandbox.exec(
            argv,
            timeout_s=limit_s,
            max_output_bytes=MAX_OUTPUT_BYTES,
            variables=variables,
            keeps_processes=keeps_processes,
            user=user,
        )

    async def _put(self, files: Iterable[TaskFile]) -> None:
        """Write files of the task into the sandbox. Raises: RefusedBySandbox."""
        assert self._sandbox is not None
        written = [
            SandboxFile(
                path=os.path.normpath(os.path.join(self._work, file.target)),
                content=_unix_lines(file),
                mode=file.mode,
            )
            for file in files
        ]
        if written:
            await self._sandbox.write_all(written)

    async def _verdict(self, task: TerminalTask, result: CommandResult) -> tuple[float, str]:
        """Return the reward and a remark. Raises: UndecidedTests."""
        if result.ended_by is not CommandEnd.EXIT:
            return 0.0, f"The tests failed: their {result.ended_by.value} limit was reached."
        # A reward that no file of the task mentions was written by the agent's programs.
        mentioned = _mentions(REWARD_WORD, (*task.tests, *task.files))
        is_asked = mentioned or task.image or task.container is not None
        reward = await self._written_reward() if is_asked else None
        if reward is None:
            must_write = mentioned and _mentions(VERIFIER.encode(), (*task.tests, *task.files))
            # A verifier that ends early may lack a download; the reference solution decides that.
            is_decided = result.exit_code != 0 and task.solution is None
            if result.exit_code in NOT_RUN or (must_write and not is_decided):
                output = result.text.strip()[-300:]
                raise UndecidedTests(
                    f"the tests gave no reward, with exit code {result.exit_code}: {output}"
                )
            reward = float(result.exit_code == 0)
        return reward, "The tests passed." if reward >= 1.0 else f"The tests gave {reward:g}."

    async def _written_reward(self) -> float | None:
        """Return the reward that the tests wrote, None without one. Raises: UndecidedTests."""
        assert self._sandbox is not None
        for path in REWARDS:
            try:
                content = await self._sandbox.read(path, max_bytes=MAX_REWARD_BYTES)
            except RefusedBySandbox as error:
                if MISSING in str(error):
                    continue
                raise UndecidedTests(str(error)) from error
            try:
                return reward_of(content.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError) as error:
                raise UndecidedTests(f"{path}: {error}") from error
        return None

    async def valid_actions(self) -> list[str]:
        """Return commands that change nothing, as a sample of all commands."""
        return [] if self._sandbox is None else ["ls -la", "pwd", "cat *", SUBMIT]

    async def expert_action(self) -> str | None:
        """Return the reference solution as one command, then `submit`; None without one."""
        if self._sandbox is None or self._task is None or self._task.solution is None:
            return None
        return action_of(self._task.solution.strip()) if self._num_turns == 0 else SUBMIT

    async def render(self) -> str:
        """Return the task's name and instruction."""
        return "" if self._task is None else f"{self._task.name}\n\n{self._task.instruction}"

    async def fingerprint(self) -> str:
        """Return a digest of the task's name, instruction and initial files."""
        task = self._task
        digest = hashlib.sha256(repr((task and task.name, task and task.instruction)).encode())
        for file in task.files if task else ():
            digest.update(f"{file.target}\0".encode() + file.content)
        return digest.hexdigest()

    async def close(self) -> None:
        """End the sandbox."""
        if self._sandbox is not None:
            sandbox = self._sandbox
            self._sandbox = None
            await sandbox.delete()


def instruction_of(hosts: Sequence[str]) -> str:
    """Return the instruction of a task whose agent reaches these hosts."""
    network = "without a network"
    if EVERY_HOST in hosts:
        network = "with a network"
    elif hosts:
        network = f"with a network that reaches only {', '.join(hosts)}"
    return INSTRUCTION.format(network=network)


def files_of_archive(content: bytes, paths: Sequence[str]) -> list[SandboxFile]:
    """Return the regular files of a tar archive that lie at absolute paths or below them.

    Raises: tarfile.TarError, ValueError, EOFError, KeyError: it is no such archive.
    """
    files: list[SandboxFile] = []
    num_bytes = 0
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            path = posixpath.normpath(f"/{member.name}")
            is_file = (
                member.isreg() or member.islnk()
            )  # tar stores one name of a hard-linked file as a link.
            if is_file and any(f"{path}/".startswith(f"{each}/") for each in paths):
                file = archive.extractfile(member)
                assert file is not None
                # Many hard links to one file, and a sparse one, are longer than the archive.
                body = file.read(MAX_ARTIFACT_BYTES - num_bytes + 1)
                num_bytes += len(body)
                if num_bytes > MAX_ARTIFACT_BYTES:
                    raise ValueError(f"its files have more than {MAX_ARTIFACT_BYTES} bytes")
                mode = 0o755 if member.mode & 0o100 else 0o644
                files.append(SandboxFile(path=path, content=body, mode=mode))
    return files


def _unix_lines(file: TaskFile) -> bytes:
    """Return the content of a file; scripts of a shell lose the line ends of Windows."""
    content = file.content
    first = content.split(b"\n", 1)[0]
    is_script = file.name.endswith(".sh") or first.startswith(b"#!")
    return content.replace(b"\r\n", b"\n") if is_script and first.endswith(b"\r") else content


def _mentions(word: bytes, files: Iterable[TaskFile]) -> bool:
    """Return whether one of the files contains a word."""
    return any(word in file.content for file in files)


def _lowered(limits: SandboxLimits, task: TerminalTask) -> SandboxLimits:
    """Return the limits of the configuration, or lower ones of the task."""
    return replace(
        limits,
        memory_bytes=min(limits.memory_bytes, task.memory_bytes or limits.memory_bytes),
        disk_bytes=min(limits.disk_bytes, task.disk_bytes or limits.disk_bytes),
    )


def load_terminal_tasks(options: EnvsSection) -> TerminalTasks:
    """Return the tasks and the sandbox. Raises: ConfigError."""
    terminal = options.terminal
    sandbox = options.sandbox
    is_built = has_containers(sandbox)
    if terminal.network != "none" and not is_built:
        raise ConfigError(
            f"envs.terminal.network={terminal.network}: the backend {sandbox.backend} has no"
            " network; set envs.sandbox.backend=docker or podman"
        )
    tasks: dict[str, list[TerminalTask]] = {}
    for split, key, folder in (
        ("train", "envs.terminal.train", terminal.train),
        ("test", "envs.terminal.eval", terminal.eval),
    ):
        # Without a folder the split is empty: a training task is never reported as held out.
        tasks[split] = (
            []
            if not folder
            else load_task_set(
                key,
                folder,
                options=terminal,
                has_images=sandbox.backend != "bwrap",
                has_containers=is_built,
            )
        )
    return TerminalTasks(
        tasks=tasks,
        options=terminal,
        limits=limits_of(sandbox),
        container_limits=container_limits_of(sandbox),
        backend=make_backend(sandbox),
        opening_s=(
            sandbox.containers.build_timeout_s
            + sandbox.containers.pull_timeout_s
            + sandbox.start_timeout_s
            if is_built
            else sandbox.start_timeout_s
        ),
    )


def check(options: EnvsSection) -> list[str]:
    """Return a line for each reason why the tasks cannot be played here."""
    try:
        shared = load_terminal_tasks(options)
    except ConfigError as error:
        return [str(error)]
    return [*filter(None, [shared.backend.problem()])]


def _digest(key: str, value: str, options: TerminalOptions) -> str:
    """Return a digest of all files of a set of tasks."""
    return digest_of_tasks(find_task_set(key, value, options))


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the catalogue entry of the tasks. Raises: ConfigError."""
    shared = load_terminal_tasks(options)
    terminal = options.terminal
    content = {"envs.terminal.train": _digest("envs.terminal.train", terminal.train, terminal)}
    if terminal.eval:
        content["envs.terminal.eval"] = _digest("envs.terminal.eval", terminal.eval, terminal)

    def make(_: Style) -> TerminalEnv:
        return TerminalEnv(shared)

    return EnvSpec(
        name="terminal",
        subsets=shared.subsets,
        instruction=dict.fromkeys(Style, shared.instruction),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=terminal.max_sessions,
        sessions_key="envs.terminal.max_sessions",
        worker_memory_bytes=worker_bytes(options.sandbox, terminal.max_sessions),
        step_timeout_s=shared.longest_s,
        takes_any_text=True,
        has_references=True,
        is_repeatable=False,  # Commands read clocks and random numbers.
        content=content,
    )
