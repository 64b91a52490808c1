"""Laws of a shell that names a closed proxy: a run reaches its own parts directly."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from learner.journal.journal import read_journal
from tests.end_to_end.runs import CLOSED_PROXY, REPOSITORY, Run, balances

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

SHORT = ("train.num_steps=2", "eval.before=false", "eval.after=false")
AGENT = ("actor.endpoint=true", 'actor.agent=["sh", "docs/examples/agent.sh"]')


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_run_succeeds_beside_a_closed_proxy(tmp_path: Path, launcher: str) -> None:
    """The agent is a program of its own, which plays through the actor's endpoint."""
    whole = (*SHORT, *AGENT, "actor.agent_lifetime=episode", f"launcher={launcher}")
    with Run(tmp_path, *whole, env=CLOSED_PROXY) as run:
        assert run.wait() == 0, run.output
    assert "restart=" not in run.output
    assert [line["step"] for line in run.metrics()] == [1, 2]
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert ledger["failed"] == 0
    played = [each for _, each in read_journal(run.root / "journal")]
    assert any(len(each.segment_starts) for each in played)  # The agent forgets its first turns.


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "run.py", *words],
        cwd=REPOSITORY,
        env={**os.environ, **CLOSED_PROXY},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


class Policy(BaseHTTPRequestHandler):
    """An endpoint that always chooses the same action."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "go forward"}
        body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


def evaluate(tmp_path: Path, url: str) -> subprocess.CompletedProcess[str]:
    own = (f"run.dir={tmp_path}", "run.name=e", "eval.num_items=2", "eval.baselines=false")
    policy = (f"policy.url={url}", "policy.model=x", "policy.max_tries=1")
    return command("eval", "--config", "smoke", *own, *policy)


@pytest.mark.long
def test_evaluation_bypasses_a_closed_proxy(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        done = evaluate(tmp_path, f"http://127.0.0.1:{server.server_port}/v1")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_remote_endpoint_error_names_the_failed_proxy(tmp_path: Path) -> None:
    done = evaluate(tmp_path, "http://elsewhere.example/v1")
    assert done.returncode != 0
    assert "of http_proxy; add elsewhere.example to no_proxy" in done.stderr


def test_remote_server_error_names_the_failed_proxy() -> None:
    url = ("env.url=http://elsewhere.example:80", "env.dialect=openenv")
    done = command("check-env", "openenv", *url)
    assert done.returncode == 2
    assert "of http_proxy; add elsewhere.example to no_proxy" in done.stderr
