"""Runs sandboxes of Harbor with its own interpreter; envhub/sandbox/harbor.py starts it.

Both directions use lines of JSON. A request has `number`, `call` and `arguments`. Its answer has
the same number with `result` or `error`. The end of the input deletes all sandboxes.
"""
# pyright: reportMissingImports=false, reportUnknownVariableType=false

import asyncio
import base64
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

MAX_LINE_BYTES = 256 << 20
GRACE_S = 60.0
CLEAR_TIMEOUT_S = 50
# podman-compose runs each command in a terminal, in which a pager would wait for keys.
TERMINAL_VARIABLES = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat"}
# Harbor starts a container by `sh -c "sleep infinity"`, whose shell may have a child. `kill -9 -1`
# would end this child, and with it the container. New processes need further rounds.
CLEAR = r"""
for round in 1 2 3 4 5 6 7 8 9; do
  left=
  for folder in /proc/[0-9]*; do
    id=${folder#/proc/}
    { IFS= read -r line < "$folder/stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    [ "$id" = 1 ] || [ "$id" = $$ ] || [ "$2" = $$ ] && continue
    [ "$2" = 1 ] && [ "$(tr '\0' ' ' < "$folder/cmdline")" = 'sleep infinity ' ] && continue
    kill -9 "$id" 2>/dev/null && left=yes
  done
  [ "$left" ] || exit 0
done
"""


class Server:
    """The sandboxes of one hub process."""

    def __init__(self) -> None:
        self._environments: dict[str, Any] = {}
        self._starts: dict[str, asyncio.Task[Any]] = {}
        self._terminals: set[str] = set()  # Sandboxes whose commands run in a terminal.
        self._folder = tempfile.TemporaryDirectory(prefix="longstride-harbor-")

    async def probe(self, provider: str) -> None:
        """Raise an error if the provider is unknown, or lacks its package or key."""
        names = [str(each.value) for each in EnvironmentType]
        if provider not in names:
            raise ValueError(f"{provider!r} is none of {', '.join(names)}")
        EnvironmentFactory.run_preflight(EnvironmentType(provider))

    async def start(
        self,
        sandbox: str,
        provider: str,
        definition: str,
        title: str,
        settings: dict[str, Any],
        network: dict[str, Any],
    ) -> str:
        """Start a sandbox, and return the folder in which its commands start."""
        folder = Path(self._folder.name) / sandbox
        empty = folder / "environment"
        empty.mkdir(parents=True)
        paths = TrialPaths(trial_dir=folder / "trial")
        paths.mkdir()
        environment = EnvironmentFactory.create_environment(
            type=EnvironmentType(provider),
            environment_dir=Path(definition) if definition else empty,
            environment_name=title,
            session_id=f"longstride-{sandbox}",
            trial_paths=paths,
            task_env_config=EnvironmentConfig(**settings),
            network_policy=NetworkPolicy(**network),
        )
        self._environments[sandbox] = environment
        task = asyncio.current_task()
        assert task is not None
        self._starts[sandbox] = task
        try:
            await environment.start(force_build=False)
            place = (await environment.exec("pwd")).stdout or "/"
        except BaseException:
            self._starts.pop(sandbox, None)  # A later `stop` does not interrupt the deletion.
            await self.stop(sandbox)
            raise
        self._starts.pop(sandbox, None)
        if place.endswith("\r\n"):
            self._terminals.add(sandbox)
        return settings.get("workdir") or place.strip()

    async def exec(
        self,
        sandbox: str,
        command: str,
        variables: dict[str, str],
        limit_s: float,
        user: str,
        max_bytes: int,
    ) -> dict[str, Any]:
        """Run a command; `code` is None if it took too long, and then all processes have ended.

        An output above `max_bytes` has a begin and an end.
        """
        environment = self._environments[sandbox]
        has_terminal = sandbox in self._terminals
        if has_terminal:
            variables = TERMINAL_VARIABLES | variables
        began_s = time.monotonic()
        code, output = None, b""
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                result = await environment.exec(
                    command,
                    env=variables or None,
                    timeout_sec=math.ceil(limit_s),
                    user=(int(user) if user.isdigit() else user) if user else None,
                )
            code = result.return_code
            output = ((result.stdout or "") + (result.stderr or "")).encode()
        except Exception:  # Each provider has an error of its own for a time limit.
            if time.monotonic() - began_s < limit_s:
                raise
            await self.clear(sandbox)
        if has_terminal:  # It has added a carriage return to each line feed.
            output = output.replace(b"\r\n", b"\n")
        is_long = len(output) > max_bytes
        half = max_bytes // 2
        return {
            "code": code,
            "begin": (output[:half] if is_long else output).decode(errors="replace"),
            "end": output[-half:].decode(errors="replace") if is_long else "",
            "num_bytes": len(output),
            "seconds": time.monotonic() - began_s,
        }

    async def clear(self, sandbox: str) -> None:
        """End all processes of a sandbox but its first one, and the one for which that one waits.

        Raises an error if it does not answer then: a lost sandbox is no command over its time.
        """
        environment = self._environments[sandbox]
        with contextlib.suppress(Exception):  # The command ends its own shell, too.
            async with asyncio.timeout(CLEAR_TIMEOUT_S):
                await environment.exec(CLEAR, timeout_sec=CLEAR_TIMEOUT_S, user="root")
        async with asyncio.timeout(CLEAR_TIMEOUT_S):
            probe = await environment.exec("true", timeout_sec=CLEAR_TIMEOUT_S, user="root")
        if probe.return_code != 0:
            raise RuntimeError(f"the sandbox runs no command: {probe.stderr or probe.stdout}")

    async def write(self, sandbox: str, path: str, content: str) -> None:
        """Write a file; its folder exists."""
        with tempfile.NamedTemporaryFile(dir=self._folder.name) as file:
            file.write(base64.b64decode(content))
            file.flush()
            await self._environments[sandbox].upload_file(file.name, path)

    async def network(self, sandbox: str, policy: dict[str, Any]) -> None:
        """Replace the network of a sandbox."""
        await self._environments[sandbox].set_network_policy(NetworkPolicy(**policy))

    async def stop(self, sandbox: str) -> None:
        """Delete a sandbox, also one that starts."""
        if (start := self._starts.pop(sandbox, None)) is not None:
            start.cancel()  # It deletes its own sandbox.
            return
        self._terminals.discard(sandbox)
        environment = self._environments.pop(sandbox, None)
        if environment is not None:
            await environment.stop(delete=True)

    async def close(self) -> None:
        """Delete all sandboxes."""
        stopping = [self.stop(sandbox) for sandbox in [*self._environments]]
        await asyncio.gather(*stopping, return_exceptions=True)
        self._folder.cleanup()


async def answer(server: Server, request: dict[str, Any], out: Any) -> None:
    """Perform a request and write its answer."""
    reply: dict[str, Any] = {"number": request["number"]}
    try:
        reply["result"] = await getattr(server, request["call"])(**request["arguments"])
    # The client reports it. The package ends the process for a missing key.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        name = "" if isinstance(error, SystemExit | ValueError) else f"{type(error).__name__}: "
        reply["error"] = f"{name}{error}"
    out.write(json.dumps(reply) + "\n")
    out.flush()


async def main() -> None:
    """Serve until the input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Prints of the package are no answers.
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    server = Server()
    tasks: set[asyncio.Task[None]] = set()
    try:
        while line := await lines.readline():
            task = asyncio.create_task(answer(server, json.loads(line), out))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.close()


if __name__ == "__main__":
    asyncio.run(main())
