"""Laws of quantised models on joining nodes: they compute with the weights of the run."""

from pathlib import Path

import pytest

from common.config.load import config_as_yaml, load_received
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.join.enrol import Joined
from common.join.files import list_shared
from common.wire.security import JoinKey
from tests.tools.dequantise.test_models import config
from tests.tools.dequantise.toys import write_fp8
from tools.dequantise.models import plain_models
from tools.launch import start


@pytest.fixture(autouse=True)
def folder_of_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def joined_to(cfg: RunConfig, folder: Path) -> Joined:
    """Return what an actor receives from a run: its configuration and small files."""
    folder.mkdir()
    for file in list_shared(Path(cfg.model.path)):
        (folder / file.name).write_bytes((Path(cfg.model.path) / file.name).read_bytes())
    key = JoinKey(
        format=1,
        run="r",
        roles=["actor"],
        server_public="s",
        client_public="c",
        client_secret="d",
        name="actor-1",
    )
    return Joined(
        address="tcp://127.0.0.1:1", key=key, config=config_as_yaml(cfg), model_path=str(folder)
    )


def on_node(joined: Joined, *overrides: str) -> RunConfig:
    """Return the configuration of an actor on a node, with its checks."""
    cfg = load_received(joined.config, start._with_defaults("actor", overrides, joined))
    cfg = plain_models(cfg)
    start._check_weights(cfg, joined)
    return cfg


def test_actor_with_adapters_needs_the_weights_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fp8(tmp_path / "fp8")
    write_fp8(tmp_path / "other")  # Its scales are random, too.
    adapters = config(tmp_path, tmp_path / "fp8", "learner.lora.rank=4", "learner.optimizer=adamw")
    run = plain_models(adapters)
    joined = joined_to(run, tmp_path / "joined")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node"))

    of_shared_disk = on_node(joined)
    assert of_shared_disk.model.path.startswith(str(tmp_path / "node"))
    assert of_shared_disk.model.quantised == str(tmp_path / "fp8")
    with pytest.raises(
        ConfigError, match=r"^model\.path=.*other: the dequantised weights .*differ"
    ):
        on_node(joined, f"model.path={tmp_path / 'other'}")
    (tmp_path / "fp8").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"sends only adapters, .* {tmp_path / 'fp8'}\. Give"):
        on_node(joined)
    copy = on_node(joined, f"model.path={tmp_path / 'elsewhere'}")
    assert Path(copy.model.path).name.startswith("elsewhere-")


def test_actor_of_a_whole_policy_needs_no_source(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8")
    run = plain_models(config(tmp_path, tmp_path / "fp8"))
    joined = joined_to(run, tmp_path / "joined")
    assert on_node(joined).model.path == str(tmp_path / "joined")
