"""Laws of asking the servers of a configuration, before anything starts, whether they answer."""

import socket
from pathlib import Path

import pytest

import run
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from envhub.catalogue.health import servers_of, silent
from envhub.catalogue.registry import Registry
from tests.in_process import carry_out
from tests.marks import long_for
from tools.checks.environments import examine_environments, missing_for


@pytest.fixture
def nobody() -> str:
    """Return an address without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def configured(*overrides: str) -> RunConfig:
    return load_config("smoke", ["model.path=unset", *overrides])


def test_silent_agentgym_server_is_named(nobody: str) -> None:
    url = nobody.replace("://", "://any:secret@")
    cfg = configured(f"env.url={url}", "env.dialect=alfworld")
    (line,) = missing_for(cfg)
    assert line.startswith(f"env.url={nobody}: no answer (Connection refused); start AgentGym's")
    assert examine_environments(cfg)["alfworld"] == [line]


def test_every_silent_site_and_retriever_is_named(nobody: str) -> None:
    cfg = configured(
        f"envs.webarena.gitlab={nobody}",
        f"envs.webarena.reddit={nobody}/f",
        f"envs.searchqa.retriever_url={nobody}/retrieve",
    )
    lines = silent(servers_of(["searchqa", "webarena", "babyai"], cfg.envs, cfg.env))
    assert sorted(line.partition("=")[0] for line in lines) == [
        "envs.searchqa.retriever_url",
        "envs.webarena.gitlab",
        "envs.webarena.reddit",
    ]
    assert servers_of(["babyai"], cfg.envs, cfg.env) == []  # Unused servers are not probed.


def test_hub_elsewhere_must_answer_as_a_hub(serve_hub, nobody: str) -> None:
    url = str(serve_hub(token="secret").client.base_url)
    (line,) = missing_for(configured(f"envhub.url={url}/agentgym/maze"))
    assert "/healthz answered 401, so this is not a hub" in line
    (line,) = missing_for(configured(f"envhub.url={nobody}"))
    assert line.startswith(f"envhub.url={nobody}: no answer (Connection refused); start it with")


def test_remote_hub_must_accept_the_token_and_offer_tasks(serve_hub, tmp_path: Path) -> None:
    url = str(serve_hub(token="secret").client.base_url)
    there, token = f"envhub.url={url}", "envhub.token=secret"
    assert missing_for(configured(there, token)) == []
    fresh = f"run.dir={tmp_path}"
    (line,) = missing_for(configured(there, fresh))
    assert line.startswith(f"envhub.token: the hub at {url} requires a token; use the token")
    (tmp_path / "smoke" / "keys").mkdir(parents=True)  # The hub may own one of them.
    assert missing_for(configured(there, fresh)) == []
    (line,) = missing_for(configured(there, fresh, "envhub.token=secrets"))
    assert line == (
        f"envhub.token: the hub at {url} refuses this token;"
        " use the token with which it was started"
    )
    (line,) = missing_for(configured(there, token, "tasks=[{env: babyia, subset: GoToLocal}]"))
    assert line.startswith("tasks[0].env='babyia': the hub at http://")
    assert line.endswith("; the nearest is 'babyai'")
    (line,) = missing_for(configured(there, token, "tasks=[{env: babyai, subset: GoToLoca}]"))
    assert line.endswith("has no such subset of babyai; the nearest is 'GoToLocal'")


HELD_OUT = """
from dataclasses import replace
from envhub.envs.rooms import make_spec as whole

def make_spec(options):
    spec = whole(options)
    subsets = {name: replace(each, num_train=0) for name, each in spec.subsets.items()}
    return replace(spec, name="held", subsets=subsets, tasks={})
"""


def test_subset_without_training_items_serves_evaluation_only(serve_hub, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD_OUT, encoding="utf-8")
    reference = f"{tmp_path / 'held.py'}:make_spec"
    (subset, *_) = Registry([reference]).spec("held").subsets
    tasks = f"tasks=[{{env: held, subset: {subset}}}]"
    url = str(serve_hub(reference).client.base_url)
    for where in (f"envhub.envs=[{reference}]", f"envhub.url={url}"):
        cfg = configured(where, tasks)
        (line,) = missing_for(cfg)
        assert line.startswith(f"tasks[0].subset={subset!r}: it has no training items in held; ")
        assert missing_for(cfg, is_to_train=False) == []


@pytest.mark.parametrize("config", ["smoke", "textcraft-qwen7b"])
@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_start_and_dry_run_refuse_subsets_without_training_items(
    config: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held.py").write_text(HELD_OUT, encoding="utf-8")
    tasks = [
        "tasks=[{env: held, subset: Carry}]",
        f"envhub.envs=[{tmp_path / 'held.py'}:make_spec]",
    ]
    model = f"model.path={ROOT}/configs/policies/tiny"  # The preset's weights are absent here.
    own = [model, f"run.dir={tmp_path / 'runs'}"]
    if flags and config != "smoke":
        own = []
    assert run.main(["train", "--config", config, *flags, *tasks, *own]) == 2
    assert "tasks[0].subset='Carry': it has no training items in held" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_server_with_any_status_counts_as_reachable(serve_hub) -> None:
    url = str(serve_hub(token="secret").client.base_url)  # 401 on every path
    cfg = configured(f"env.url={url}/agentgym/maze", "env.dialect=maze")
    assert missing_for(cfg) == []


@pytest.mark.parametrize("url", ["http://", "ftp://127.0.0.1/x", "http://127.0.0.1:port", "x"])
def test_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=f"^envhub.url='{url}': must be http://host"):
        configured(f"envhub.url={url}")


@pytest.mark.slow
@pytest.mark.parametrize("command", long_for(["train", "eval", "doctor", "envhub"], ["eval"]))
def test_every_command_reports_a_silent_server_at_start(
    command: str, nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, f"env.url={nobody}", "env.dialect=alfworld"]
    if command != "envhub":
        argv += ["--config", "smoke", f"run.dir={tmp_path}"]
    done = carry_out(argv, capsys)
    told = done.stdout if command == "doctor" else done.stderr
    assert done.returncode != 0
    assert f"env.url={nobody}: no answer (Connection refused)" in told
    assert list(tmp_path.iterdir()) == []
