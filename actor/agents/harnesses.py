"""Harnesses by name: agents of others that play in the sandbox of their task.

`actor.agent=[codex]` starts this file once per episode. The harness runs as one command of the
environment `terminal`, in the sandbox or the container of the task, so that its files and commands
are those of the task. Its environment has no variable of the host. It has no network; a Unix socket
in a folder that the sandbox shows leads to the policy. The hub must be on the actor's machine.
"""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from actor.agents.installation import (
    SOCKETS,
    HarnessPackage,
    folder_of,
    install,
    node_of,
    python_of,
)
from common.config.actor import ActorSection, AgentLifetime
from common.errors import ConfigError
from common.http.blocking import request

logger = logging.getLogger(__name__)

# Port of the policy in the network of the sandbox, which no server of a task has.
PORT = 39055
MODEL = "policy"
HOME = "/tmp/agent"  # Home of a harness; every sandbox and container has a /tmp to write.
BUFFER_BYTES = 1 << 16
STEP_S = 7 * 86_400.0  # The deadline of the episode ends a step, and the limits of the environment.
# Node reserves 10 GiB of addresses for a module of WebAssembly, such as the parser of `fetch`. The
# limits of a sandbox refuse this.
NODE_OPTION = "--disable-wasm-trap-handler"
# Both forward connections of the sandbox to the socket, run the harness, and return its exit code.
NODE_RELAY = """
const [place, port, command, ...words] = process.argv.slice(1)
const serve = (client) => {
  const policy = require("net").connect(place)
  const end = () => { client.destroy(); policy.destroy() }
  client.on("error", end).pipe(policy).on("error", end).pipe(client)
}
require("net").createServer(serve).listen(Number(port), "127.0.0.1", () => {
  const child = require("child_process").spawn(command, words, {stdio: ["ignore", 1, 1]})
  child.on("error", (error) => { console.error(error.message); process.exit(127) })
  child.on("exit", (code) => process.exit(code ?? 1))
})
"""
PYTHON_RELAY = """
import socket, subprocess, sys, threading
place, port, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
def pump(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    try:
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
def serve(listener):
    while True:
        client, _ = listener.accept()
        policy = socket.socket(socket.AF_UNIX)
        try:
            policy.connect(place)
        except OSError:
            client.close()
            continue
        for pair in ((client, policy), (policy, client)):
            threading.Thread(target=pump, args=pair, daemon=True).start()
listener = socket.create_server(("127.0.0.1", port))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
sys.exit(subprocess.run(command, stdin=subprocess.DEVNULL).returncode)
"""
# Runs a module of the installed packages. The variables of the harness's own commands name none.
RUN_MODULE = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAccess:
    """How a harness reaches the policy."""

    url: str  # Base URL of OpenAI's APIs inside the sandbox.
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """An agent of others with a fixed version."""

    package: HarnessPackage
    # (folder of the installation, task) -> command line
    command: Callable[[str, str], list[str]]
    # PolicyAccess -> files of its home, by path
    files: Callable[[PolicyAccess], dict[str, str]]
    # PolicyAccess -> its variables, beside PATH and HOME
    variables: Callable[[PolicyAccess], dict[str, str]]


def _node(folder: str, script: str, *words: str) -> list[str]:
    """Return the command line of a script of npm's packages."""
    return [node_of(folder), NODE_OPTION, f"{folder}/node_modules/{script}", *words]


def _module(folder: str, name: str, *words: str) -> list[str]:
    """Return the command line of a module of the Python index's packages."""
    return [python_of(folder), "-c", RUN_MODULE, f"{folder}/packages", name, *words]


def _codex_files(access: PolicyAccess) -> dict[str, str]:
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "longstride"',
        'approval_policy = "never"',
        'sandbox_mode = "danger-full-access"',  # The sandbox of the task is the only one.
        "[model_providers.longstride]",
        'name = "longstride"',
        f'base_url = "{access.url}"',
        'env_key = "OPENAI_API_KEY"',
        'wire_api = "responses"',
        "supports_websockets = false",
    ]
    return {".codex/config.toml": "\n".join(lines) + "\n"}


def _opencode_files(access: PolicyAccess) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "longstride",
        "options": {"baseURL": access.url, "apiKey": access.key},
        "models": {MODEL: {"name": MODEL, "tool_call": True}},
    }
    config = {
        "provider": {"longstride": provider},
        "model": f"longstride/{MODEL}",
        "small_model": f"longstride/{MODEL}",
        "share": "disabled",
        "autoupdate": False,
        "permission": {
            **dict.fromkeys(("edit", "bash", "external_directory"), "allow"),
            "webfetch": "deny",
        },
    }
    return {".config/opencode/opencode.json": json.dumps(config)}


MINI = """
agent:
  system_template: |
    You work in a Linux shell. Each answer has exactly one command in a block:
    ```mswea_bash_command
    ls -la
    ```
  instance_template: |
    {{task}}

    When the task is finished, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` alone.
  step_limit: 30
  cost_limit: 0
  mode: yolo
  confirm_exit: false
model:
  model_class: litellm_textbased
  model_name: openai/policy
  cost_tracking: ignore_errors
  model_kwargs:
    drop_params: true
    timeout: 600
  observation_template: "{{ output.output }}"
  format_error_template: Answer with exactly one mswea_bash_command block.
environment:
  environment_class: local
"""


# Harbor's Terminus controls a terminal of tmux. Its environment is the sandbox in which it runs.
TERMINUS = """
import asyncio, os, subprocess, sys, types
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext
async def execute(command, cwd=None, env=None, timeout_sec=None, user=None):
    run = lambda: subprocess.run(["bash", "-c", command], capture_output=True, text=True,
                                 stdin=subprocess.DEVNULL, timeout=timeout_sec, cwd=cwd)
    done = await asyncio.to_thread(run)
    return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)
async def is_absent(path, user=None):
    return False
async def play(home, url):
    probe = await execute("tmux -V && mkdir -p /logs/agent")
    if probe.return_code:
        sys.exit(f"terminus needs tmux in the image of the task: {probe.stderr}")
    here = types.SimpleNamespace(exec=execute, default_user=None, session_id="terminus",
                                 is_dir=is_absent, is_file=is_absent, trial_paths=None)
    agent = Terminus2(Path(home), model_name="openai/policy", api_base=url, max_turns=50,
                      record_terminal_session=False, suppress_max_turns_warning=True)
    await agent.setup(here)
    await agent.run(sys.argv[2], here, AgentContext())
asyncio.run(play(os.environ["HOME"], os.environ["OPENAI_BASE_URL"]))
"""


def _openai(access: PolicyAccess) -> dict[str, str]:
    names = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
    return {**dict.fromkeys(names, access.url), "OPENAI_API_KEY": access.key}


HARNESSES = {
    "codex": Harness(
        package=HarnessPackage(name="codex", package="@openai/codex", version="0.171.0"),
        command=lambda folder, task: [
            *_node(folder, "@openai/codex/bin/codex.js", "exec", "--skip-git-repo-check"),
            *("--color", "never", task),
        ],
        files=_codex_files,
        variables=_openai,
    ),
    "opencode": Harness(
        package=HarnessPackage(name="opencode", package="opencode-ai", version="1.18.33"),
        command=lambda folder, task: [
            *(f"{folder}/node_modules/.bin/opencode", "run", "-m", f"longstride/{MODEL}", task)
        ],
        files=_opencode_files,
        variables=lambda access: {
            **_openai(access),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
    ),
    "qwen-code": Harness(
        package=HarnessPackage(name="qwen-code", package="@qwen-code/qwen-code", version="0.24.4"),
        command=lambda folder, task: [
            *_node(folder, "@qwen-code/qwen-code/cli.js", "--auth-type", "openai", "-y"),
            *("-p", task),
        ],
        files=lambda _: {},
        variables=lambda access: {
            **_openai(access),
            "OPENAI_MODEL": MODEL,
            "QWEN_CODE_NO_RELAUNCH": "true",  # A second Node would lack the option.
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        },
    ),
    "mini-swe-agent": Harness(
        package=HarnessPackage(
            name="mini-swe-agent",
            package="mini-swe-agent",
            version="2.4.6",
            python=((3, 10), (3, 14)),
        ),
        command=lambda folder, task: _module(
            folder,
            "minisweagent.run.mini",
            *("-y", "--exit-immediately", "-c", f"{HOME}/mini.yaml", "-t", task),
            *("-o", f"{HOME}/mini.traj.json"),
        ),
        files=lambda _: {"mini.yaml": MINI},
        variables=lambda access: {
            **_openai(access),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{HOME}/mini",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
    "aider": Harness(
        package=HarnessPackage(
            name="aider", package="aider-chat", version="0.86.2", python=((3, 10), (3, 13))
        ),
        command=lambda folder, task: _module(
            *(folder, "aider", "--model", f"openai/{MODEL}", "--edit-format", "whole"),
            *("--yes-always", "--no-git", "--no-pretty", "--map-tokens", "0"),
            *("--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"),
            *("--analytics-disable", "--no-detect-urls", "--no-gitignore"),
            *("--input-history-file", f"{HOME}/input", "--chat-history-file", f"{HOME}/chat"),
            *("--message", task),
        ),
        files=lambda _: {},
        variables=lambda access: {**_openai(access), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    "openhands": Harness(
        package=HarnessPackage(
            name="openhands", package="openhands", version="1.16.0", python=((3, 12), (3, 13))
        ),
        command=lambda folder, task: _module(
            *(folder, "openhands_cli.entrypoint", "--headless", "--json", "--override-with-envs"),
            *("-t", task),
        ),
        files=lambda _: {},
        variables=lambda access: {
            "LLM_MODEL": f"openai/{MODEL}",
            "LLM_BASE_URL": access.url,
            "LLM_API_KEY": access.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        },
    ),
    "terminus": Harness(
        package=HarnessPackage(
            name="terminus", package="harbor", version="0.25.0", python=((3, 12), (3, 14))
        ),
        command=lambda folder, task: [
            *(python_of(folder), "-c", TERMINUS, f"{folder}/packages", task)
        ],
        files=lambda _: {},
        variables=lambda access: {**_openai(access), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
}


def script_of(
    harness: Harness, folder: Path, *, task: str, access: PolicyAccess, place: str, port: int = PORT
) -> str:
    """Return the command that runs a harness in the sandbox of its task.

    Args:
        folder: folder of the installation.
        place: path of the policy's socket.
        port: port of the policy in the network of the sandbox; 0: any, for a harness without it.
    """
    lines = [
        f"mkdir -p {shlex.quote(os.path.dirname(f'{HOME}/{path}'))} && "
        f"printf %s {shlex.quote(text)} > {shlex.quote(f'{HOME}/{path}')}"
        for path, text in {".hushlogin": "", **harness.files(access)}.items()
    ]
    variables = {
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
        **harness.variables(access),
    }
    # A sandbox has no variable of the host, but those of the task's image, as PATH.
    argv = ["env", *(f"{name}={value}" for name, value in variables.items())]
    if harness.package.is_npm:
        argv += [node_of(f"{folder}"), "-e", NODE_RELAY, "--"]
    else:
        argv += [python_of(f"{folder}"), "-c", PYTHON_RELAY]
    argv += [place, f"{port}", *harness.command(f"{folder}", task)]
    return "\n".join([*lines, shlex.join(argv)])


class HarnessEpisode:
    """The environment of an episode, as the actor's endpoint offers it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Use the variables of an agent's process."""
        self._url = variables["LONGSTRIDE_ENV"]
        self._key = variables["OPENAI_API_KEY"]

    def task(self) -> dict[str, Any]:
        """Return the task."""
        return self._call(self._url)

    def step(self, action: str) -> dict[str, Any]:
        """Send an action and return its result."""
        return self._call(f"{self._url}/step", {"action": action})

    def _call(self, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of the endpoint. Raises: OSError: it gave none, or an error."""
        answer = request(
            url,
            method="GET" if body is None else "POST",
            body=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
            timeout_s=STEP_S,
            is_own=True,
        )
        if not answer.is_ok:
            raise OSError(f"{url}: {answer.shown}")
        return json.loads(answer.body)


@contextlib.asynccontextmanager
async def policy_socket(root: Path, url: str) -> AsyncIterator[Path]:
    """Listen at a Unix socket, whose connections lead to the policy; yield its path."""
    parts = urlsplit(url)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError as error:
            logger.warning("the policy does not answer url=%s reason=%s", url, error)
            writer.close()
            return
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    folder = Path(tempfile.mkdtemp(dir=root / SOCKETS))
    folder.chmod(0o755)
    place = folder / "policy"
    server = await asyncio.start_unix_server(forward, place)
    place.chmod(0o666)  # The sandbox has another user. The key of the episode protects the policy.
    try:
        yield place
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until the end of a connection."""
    with contextlib.suppress(ConnectionError):
        while content := await reader.read(BUFFER_BYTES):
            writer.write(content)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


async def play(name: str, root: Path, variables: Mapping[str, str]) -> None:
    """Play the episode of an agent's process with a harness."""
    episode = HarnessEpisode(variables)
    task = await asyncio.to_thread(episode.task)
    url = variables["OPENAI_BASE_URL"]
    async with policy_socket(root, url) as place:
        access = PolicyAccess(
            url=f"http://127.0.0.1:{PORT}{urlsplit(url).path}", key=variables["OPENAI_API_KEY"]
        )
        script = script_of(
            HARNESSES[name],
            folder_of(HARNESSES[name].package, root),
            task=f"{task['observation']}",
            access=access,
            place=f"{place}",
        )
        result = await asyncio.to_thread(episode.step, f"````bash\n{script}\n````")
    sys.stdout.write(f"{result['observation']}\n")
    sys.stdout.flush()
    if not (result["done"] or result["truncated"]):
        await asyncio.to_thread(episode.step, "submit")


def harness_of(agent: Sequence[str]) -> str:
    """Return the harness that `actor.agent` names, "" for another command line."""
    return agent[0] if len(agent) == 1 and agent[0] in HARNESSES else ""


def root_of(cfg: ActorSection) -> Path:
    """Return the folder of all harnesses."""
    if cfg.harnesses:
        return Path(cfg.harnesses)
    return Path("/var/tmp") / f"longstride-harnesses-{os.getuid()}"  # A sandbox hides /tmp.


def command_of(cfg: ActorSection) -> list[str]:
    """Return the command line of the agent; a named harness is installed first.

    Raises: ConfigError: it cannot be installed, its processes outlive an episode, or the endpoint
        has a certificate.
    """
    name = harness_of(cfg.agent)
    if not name:
        return list(cfg.agent)
    if cfg.agent_lifetime is not AgentLifetime.EPISODE:
        raise ConfigError(f"actor.agent_lifetime={cfg.agent_lifetime}: must be episode for {name}")
    if cfg.agents.tls_certificate:
        raise ConfigError(
            f"actor.agents.tls_certificate={cfg.agents.tls_certificate}: must be empty for {name},"
            " which reaches the policy by a socket of this machine"
        )
    root = root_of(cfg).absolute()
    if root.is_relative_to("/tmp"):
        raise ConfigError(f"actor.harnesses={root}: must not be below /tmp, which a sandbox hides")
    install(HARNESSES[name].package, root)
    return [sys.executable, "-m", "actor.agents.harnesses", name, f"{root}"]


if __name__ == "__main__":
    asyncio.run(play(sys.argv[1], Path(sys.argv[2]), os.environ))
