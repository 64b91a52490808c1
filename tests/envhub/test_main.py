"""Laws of starting and stopping the hub."""

import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from envhub.main import build
from envhub.registry import REQUIREMENTS, Registry, Requirement, UnknownEnv, missing_requirements


def built(**changes):
    options = {"envs": ["textcraft"], "host": "127.0.0.1", "token": None}
    limits = {"lease_s": 60.0, "capacity": 4, "step_timeout_s": 5.0}
    return build(**(options | limits | changes))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_hub_refuses_an_open_host_without_token(host):
    with pytest.raises(ValueError, match="set a token"):
        built(host=host)
    built(host=host, token="secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_hub_accepts_loopback_without_token(host):
    built(host=host)


def test_hub_refuses_an_empty_token():
    with pytest.raises(ValueError, match="token is empty"):
        built(host="0.0.0.0", token=" ")


def test_registry_names_the_nearest_environment():
    with pytest.raises(UnknownEnv, match="nearest is 'textcraft'"):
        Registry(["textcarft"])


def test_missing_requirements_gives_the_remedy():
    assert missing_requirements(["babyai", "textcraft"]) == []
    needs = Requirement(what="a moon", binaries=("no-such-binary",), remedy="apt install moon")
    REQUIREMENTS["textcraft"] = (needs,)
    try:
        assert missing_requirements(["textcraft"]) == ["textcraft needs a moon: apt install moon"]
        with pytest.raises(ValueError, match="apt install moon"):
            built()
    finally:
        del REQUIREMENTS["textcraft"]


def test_hub_process_stops_on_sigterm_within_three_seconds():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = (
        "from envhub.main import serve; serve(envs=['textcraft'], host='127.0.0.1',"
        f"port={port}, token=None, lease_s=60, capacity=4, step_timeout_s=5)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        with httpx.Client(trust_env=False) as client:  # its open connection must not delay the stop
            deadline_s = time.monotonic() + 10
            while True:
                try:
                    answer = client.get(f"http://127.0.0.1:{port}/healthz")
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.05)  # nothing to await: another process opens the port
            assert answer.json()["status"] == "ok"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=3) == 0
    finally:
        process.kill()
        process.wait(timeout=5)
