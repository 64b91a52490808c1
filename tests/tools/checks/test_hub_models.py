"""Laws of models by name, with a cache folder of the Hugging Face layout."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import run
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import mark_finished, prepare, save_config
from tests.tools.checks.toy_hub import serving
from tools.checks import hub_models
from tools.checks.hub_models import download_lines, is_hub_name, resolve_models
from tools.checks.preflight import check, check_dry

OLD, NEW = "a" * 40, "b" * 40
NAME = "some-org/Tiny-1M"


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an offline cache with two commits; `main` is the newer one."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_models._resolve.cache_clear()
    repository = tmp_path / "hub" / "models--some-org--Tiny-1M"
    for commit in (OLD, NEW):
        shutil.copytree(ROOT / "configs/policies/tiny", repository / "snapshots" / commit)
    point_main(repository, NEW)
    return repository


def point_main(repository: Path, commit: str) -> None:
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    where = (f"run.dir={tmp_path}", "run.name=r")
    return load_config("smoke", [*where, *overrides])


def resolved(cfg: RunConfig, *, is_dry: bool = False) -> RunConfig:
    hub_models._resolve.cache_clear()  # as in another process
    return resolve_models(cfg, is_dry=is_dry)


def test_name_becomes_the_folder_of_one_commit(tmp_path: Path, cached: Path) -> None:
    model = resolved(config(tmp_path, f"model.path={NAME}")).model
    assert model.path == str(cached / "snapshots" / NEW)
    assert model.source == f"{NAME}@{NEW}"
    assert model.label == NAME


@pytest.mark.parametrize("revision", [OLD, "main"])
def test_revision_selects_its_commit(tmp_path: Path, cached: Path, revision: str) -> None:
    model = resolved(config(tmp_path, f"model.path={NAME}@{revision}")).model
    assert model.source == f"{NAME}@{OLD if revision == OLD else NEW}"


@pytest.mark.parametrize("name", [NAME, f"{NAME}@main"])
def test_resumed_run_keeps_its_commit(
    tmp_path: Path, cached: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    point_main(cached, OLD)
    cfg = config(tmp_path, f"model.path={name}")
    run_dir = RunDir(root=tmp_path / "r")
    save_config(resolved(cfg), run_dir.config)
    assert "keeps the commit" not in caplog.text
    point_main(cached, NEW)
    again = resolved(cfg)
    assert again.model.source == f"{NAME}@{OLD}"
    assert again.model.path == str(cached / "snapshots" / OLD)
    assert f"name={name} commit={OLD} newer={NEW}" in caplog.text
    assert prepare(again, run_dir) is None
    assert resolved(config(tmp_path, f"model.path={NAME}")).model.source == f"{NAME}@{OLD}"


@pytest.mark.parametrize("other", [NEW, NEW[:7], "v2"])
def test_another_revision_is_another_experiment(tmp_path: Path, cached: Path, other: str) -> None:
    point_main(cached, OLD)
    (cached / "refs" / "v2").write_text(NEW, encoding="utf-8")
    run_dir = RunDir(root=tmp_path / "r")
    save_config(resolved(config(tmp_path, f"model.path={NAME}@main")), run_dir.config)
    now = resolved(config(tmp_path, f"model.path={NAME}@{other}"))
    with pytest.raises(ConfigError, match=f"model.path: was {NAME}@{OLD}, now {NAME}@{NEW}"):
        prepare(now, run_dir)


def test_all_names_of_a_resumed_run_keep_their_commits(tmp_path: Path, cached: Path) -> None:
    point_main(cached, OLD)
    keys = ("algorithm.reference_path", "learner.critic.path", "algorithm.teacher.path")
    cfg = config(tmp_path, *(f"{key}={NAME}@main" for key in keys))
    save_config(resolved(cfg), RunDir(root=tmp_path / "r").config)
    point_main(cached, NEW)
    again = resolved(cfg)
    assert again.algorithm.reference_path == str(cached / "snapshots" / OLD)
    assert again.learner.critic.path == str(cached / "snapshots" / OLD)
    assert again.algorithm.teacher.path == str(cached / "snapshots" / OLD)


def test_run_after_a_finished_one_resolves_its_name_again(tmp_path: Path, cached: Path) -> None:
    point_main(cached, OLD)
    cfg = config(tmp_path, f"model.path={NAME}@main", "train.num_steps=5")
    run_dir = RunDir(root=tmp_path / "r")
    save_config(resolved(cfg), run_dir.config)
    mark_finished(run_dir, version=5, result="done")
    point_main(cached, NEW)
    longer = config(tmp_path, f"model.path={NAME}@main", "train.num_steps=6")
    assert resolved(longer).model.source == f"{NAME}@{OLD}"  # It continues the finished run.
    assert resolved(cfg).model.source == f"{NAME}@{NEW}"


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named_with_two_remedies(tmp_path: Path, cached: Path, gone: str) -> None:
    (cached / "snapshots" / NEW / gone).unlink()
    with pytest.raises(ConfigError) as caught:
        resolved(config(tmp_path, f"model.path={NAME}"))
    text = str(caught.value)
    assert text.startswith(f"model.path={NAME}: the cache lacks {gone} of {NAME}, ")
    assert f"`hf download {NAME}`" in text
    assert f"copy its cache to {tmp_path}/hub" in text
    assert "model.path=FOLDER" in text


def test_missing_shard_is_named(tmp_path: Path, cached: Path) -> None:
    folder = cached / "snapshots" / NEW
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the cache lacks model-2\.safetensors of"):
        resolved(config(tmp_path, f"model.path={NAME}"))


def test_unknown_model_or_revision_is_refused(tmp_path: Path) -> None:
    for name in ("other/none", f"{NAME}@v9", f"{NAME}@{'c' * 40}"):
        with pytest.raises(ConfigError, match=r"the cache lacks config\.json, tokenizer\.json"):
            resolved(config(tmp_path, f"model.path={name}"))


def test_short_commit_selects_its_commit(tmp_path: Path, cached: Path) -> None:
    model = resolved(config(tmp_path, f"model.path={NAME}@{OLD[:7]}")).model
    assert model.source == f"{NAME}@{OLD}"
    shutil.copytree(cached / "snapshots" / OLD, cached / "snapshots" / (OLD[:-1] + "b"))
    with pytest.raises(ConfigError, match=r"the cache lacks config\.json"):  # Two commits match.
        resolved(config(tmp_path, f"model.path={NAME}@{OLD[:7]}"))


@pytest.mark.parametrize("revision", ["v1.0", "feature/x", "refs/pr/3"])
def test_tag_or_branch_selects_its_commit(tmp_path: Path, cached: Path, revision: str) -> None:
    path = cached / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OLD, encoding="utf-8")
    model = resolved(config(tmp_path, f"model.path={NAME}@{revision}")).model
    assert model.source == f"{NAME}@{OLD}"


def test_link_to_a_missing_file_counts_as_missing(tmp_path: Path, cached: Path) -> None:
    weights = cached / "snapshots" / NEW / "model.safetensors"
    weights.unlink()
    weights.symlink_to(cached / "blobs" / "gone")
    with pytest.raises(ConfigError, match=r"the cache lacks model\.safetensors of"):
        resolved(config(tmp_path, f"model.path={NAME}"))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_damaged_index_is_named(tmp_path: Path, cached: Path, text: str) -> None:
    path = cached / "snapshots" / NEW / "model.safetensors.index.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"index\.json: has no list of files"):
        resolved(config(tmp_path, f"model.path={NAME}"))


def test_name_that_no_repository_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=some-org/a--b: "):
        resolved(config(tmp_path, "model.path=some-org/a--b"))


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow requests, with a new HTTP client before and after the test."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    "proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1", "x://y", "http://[z"]
)
@pytest.mark.usefixtures("online")
def test_cache_is_used_behind_an_unusable_proxy(
    tmp_path: Path, cached: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
        monkeypatch.setenv(name.lower(), proxy)
    model = resolved(config(tmp_path, f"model.path={NAME}")).model
    assert model.source == f"{NAME}@{NEW}"
    (cached / "snapshots" / NEW / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"the cache lacks config\.json of .*could not be fetched \("
    ):
        resolved(config(tmp_path, f"model.path={NAME}"))


@pytest.mark.usefixtures("online")
def test_fetched_model_is_found_without_the_hub(
    tmp_path: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(cached)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(NAME, NEW, ROOT / "configs/policies/tiny") as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        first = resolved(config(tmp_path, f"model.path={NAME}")).model
    assert first.source == f"{NAME}@{NEW}"
    again = resolved(config(tmp_path, f"model.path={NAME}")).model
    assert again.source == first.source
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolved(config(tmp_path, f"model.path={NAME}@main")).model.source == first.source


def test_dry_run_needs_no_weights(tmp_path: Path, cached: Path) -> None:
    folder = cached / "snapshots" / NEW
    (folder / "model.safetensors").unlink()
    model = resolved(config(tmp_path, f"model.path={NAME}"), is_dry=True).model
    assert (model.path, model.architecture) == (str(folder), str(folder))


def test_dry_run_names_the_weights_that_a_start_downloads(tmp_path: Path, cached: Path) -> None:
    folder = cached / "snapshots" / NEW
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors"}, "metadata": {"total_size": 61.06e9}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    keys = ("algorithm.reference_path", "algorithm.teacher.path", "learner.critic.path")
    overrides = [f"{key}={NAME}" for key in keys]
    cfg = config(tmp_path, "algorithm.kl_coef=0.1", "learner.critic.kind=model", *overrides)
    for key in keys:
        with pytest.raises(ConfigError, match=r"the cache lacks model-1\.safetensors of"):
            resolved(config(tmp_path, f"{key}={NAME}"))
    dry = resolved(cfg, is_dry=True)
    weights = f"model-1.safetensors (the whole model has 61.1 GB) of {NAME}"
    assert download_lines(dry) == [f"download: {key} needs {weights}" for key in keys]
    check_dry(dry)
    with pytest.raises(ConfigError, match=r"algorithm\.reference_path=.*: "):
        check(dry)


@pytest.mark.slow
def test_dry_evaluation_names_the_weights_that_a_start_downloads(
    tmp_path: Path, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cached / "snapshots" / NEW / "model.safetensors").unlink()
    argv = ["eval", "--config", "smoke", f"model.path={NAME}", f"run.dir={tmp_path}"]
    assert run.main([*argv, "--dry-run"]) == 0
    assert f"# download: model.path needs model.safetensors of {NAME}\n" in capsys.readouterr().out
    hub_models._resolve.cache_clear()
    assert run.main(argv) == 2
    assert "the cache lacks model.safetensors of" in capsys.readouterr().err


@pytest.mark.slow
def test_dry_evaluation_has_the_architecture_of_an_unreachable_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "model.architecture=configs/architectures/qwen3-0.6b"
    argv = ["eval", "--config", "smoke", "model.path=other/none", sizes, f"run.dir={tmp_path}"]
    assert run.main([*argv, "--dry-run"]) == 0
    assert "  path: configs/architectures/qwen3-0.6b\n" in capsys.readouterr().out
    assert run.main(argv) == 2


def test_all_keys_of_models_take_names(tmp_path: Path, cached: Path) -> None:
    cfg = config(
        tmp_path,
        f"model.path={NAME}@{OLD}",
        f"model.architecture={NAME}",
        f"algorithm.reference_path={NAME}",
        f"learner.critic.path={NAME}",
    )
    got = resolved(cfg)
    newest = str(cached / "snapshots" / NEW)
    assert got.model.path == str(cached / "snapshots" / OLD)
    assert got.model.architecture == newest
    assert got.algorithm.reference_path == newest
    assert got.learner.critic.path == newest


@pytest.mark.parametrize(
    "path", ["configs/policies", "docs/x", "a/b/c", "/a/b", "./a", "unset", "a b/c", "../a"]
)
def test_paths_are_no_names(path: str) -> None:
    assert not is_hub_name(path)


def test_folder_is_left_unchanged(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    assert resolved(cfg) == cfg
    assert resolved(replace(cfg, model=replace(cfg.model, path=str(tmp_path)))).model.source == ""
