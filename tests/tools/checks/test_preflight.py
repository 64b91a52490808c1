"""Laws of the checks before a start."""

import json
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.lock import hold_run
from common.host.machine import compiler_problem, has_cuda, library_problem, torchvision_problem
from learner.policy.model_shape import read_shape, weight_files
from tests.tools.checks.models import write_model
from tools.checks.preflight import (
    check,
    check_build,
    check_devices,
    check_engine,
    check_model,
    engine_build,
    on_this_machine,
    warn_of_unread_keys,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_rest=1, vocab_size=64, num_hidden_layers=1)


def configure(model: Path, *overrides: str) -> RunConfig:
    where = [f"model.path={model}", f"run.dir={model.parent / 'runs'}"]
    return load_config("smoke", [*where, *overrides])


def test_cluster_engines_are_not_counted_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = load_config("smoke", ["launcher=ray", "actor.num_actors=900"])
    assert on_this_machine(cfg) == cfg  # a cluster of its own is this machine
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert on_this_machine(cfg).actor.num_actors == 0
    assert on_this_machine(cfg).learner == cfg.learner


def test_complete_configuration_passes_preflight(model: Path) -> None:
    check(configure(model))


def test_engine_is_built_for_the_device_of_the_machine() -> None:
    check_build(engine_build(), on_gpu=has_cuda())
    with pytest.raises(
        ConfigError, match=r"0\.32\.0 is a build for GPUs, .* shows none.*--gpus all"
    ):
        check_build("0.32.0", on_gpu=False)
    with pytest.raises(ConfigError, match=r"0\.32\.0\+cpu is a build for CPUs, .* has a GPU"):
        check_build("0.32.0+cpu", on_gpu=True)
    check_build("0.32.0", on_gpu=True)
    check_build("0.32.0+cpu", on_gpu=False)


@pytest.mark.parametrize(
    ("torch", "torchvision", "is_refused"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0+cpu", "", False),
        ("2.13.0", "0.28.0", False),
    ],
)
def test_torchvision_of_another_build_is_refused(
    torch: str, torchvision: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, version in (("torch", torch), ("torchvision", torchvision)):
        folder = tmp_path / f"{package}-{version}.dist-info"
        folder.mkdir()
        if version:
            text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            (folder / "METADATA").write_text(text, encoding="utf-8")
        else:
            folder.rmdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert bool(torchvision_problem()) is is_refused
    if is_refused:
        with pytest.raises(ConfigError, match="pip uninstall torchvision"):
            check_engine()


@pytest.mark.skipif(has_cuda(), reason="a GPU's engine takes smaller heads")
def test_cpu_engine_refuses_small_attention_heads_early(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 1}
    model = write_model(tmp_path / "small", num_rest=1, vocab_size=64, **sizes)
    words = r"heads have size 16, .* supports 32, 64, .* sft\.num_heads=4 with sft\.hidden_size=128"
    with pytest.raises(ConfigError, match=words):
        check(configure(model))
    check(configure(model, "actor.num_actors=0"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer files"),
        ("model.safetensors", "*.safetensors"),
    ],
)
def test_model_with_a_missing_file_is_refused(name: str, words: str, model: Path) -> None:
    (model / name).unlink()
    with pytest.raises(ConfigError, match=r"model\.path=") as caught:
        check(configure(model))
    assert f"lacks {words};" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        # The header states 16 bytes of numbers; 10 of them are there.
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', "lacks its last 6 bytes"),
        (b"{}", ""),
        (b"no JSON", "has no header of safetensors"),
    ],
)
def test_incomplete_weights_are_refused_before_start(
    content: bytes, words: str, model: Path
) -> None:
    file = model / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(content)) + content + bytes(10))
    if not words:
        check_model(str(model))
        return
    with pytest.raises(ConfigError, match=rf": model\.safetensors {words}; copy or"):
        check_model(str(model))
    file.write_text("version https://git-lfs.github.com/spec/v1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.safetensors has no header of safetensors"):
        check_model(str(model))


WHOLE = "model.safetensors"
SHARDS = ("model-1.safetensors", "model-2.safetensors")


def write_files(model: Path, files: Sequence[str], listed: Sequence[str]) -> None:
    """Replace the weights of a checkpoint by copies under other names, with an index of some."""
    content = (model / WHOLE).read_bytes()
    (model / WHOLE).unlink()
    for name in files:
        (model / name).write_bytes(content)
    if listed:
        tree = {"weight_map": {f"tensor{at}": name for at, name in enumerate(listed)}}
        (model / f"{WHOLE}.index.json").write_text(json.dumps(tree), encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "listed", "words"),
    [
        (SHARDS[:1], SHARDS, r"lacks model-2\.safetensors, .*\(missing files: 1 of 2\)"),
        ((WHOLE, *SHARDS), SHARDS, r"the learner would read model\.safetensors, and the engine"),
        ((WHOLE, "old.safetensors"), (), r"the engine would read old\.safetensors beside"),
        (SHARDS, (), r"lacks model\.safetensors, or model\.safetensors\.index\.json with"),
    ],
)
def test_weights_that_libraries_choose_differently_are_refused(
    files: Sequence[str], listed: Sequence[str], words: str, model: Path
) -> None:
    write_files(model, files, listed)
    with pytest.raises(ConfigError, match=words):
        check_model(str(model))


def test_weights_in_a_second_format_are_left_out(model: Path) -> None:
    before = read_shape(model).num_params
    others = ("consolidated.safetensors", "pytorch_model.bin")
    write_files(model, (*SHARDS, *others), SHARDS)
    check_model(str(model))
    assert [each.name for each in weight_files(model)] == list(SHARDS)
    assert read_shape(model).num_params == 2 * before, "both shards are copies"


def test_damaged_index_is_refused_by_its_name(model: Path) -> None:
    (model / f"{WHOLE}.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"index\.json has no list of files \(weight_map\)"):
        check_model(str(model))


def test_taken_port_is_refused_by_its_key(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^envhub.port={port}: cannot bind"):
            check(configure(model, f"envhub.port={port}"))
        check(configure(model, f"envhub.port={port}", "envhub.url=http://x"))


def test_one_port_for_two_roles_is_refused(model: Path) -> None:
    cfg = configure(model, "scheduler.port=45123", "learner.port=45123")
    with pytest.raises(ConfigError, match=r"learner.port=45123: scheduler.port uses this port"):
        check(cfg)


def test_metrics_port_of_another_role_is_refused(model: Path) -> None:
    cfg = configure(model, "scheduler.port=45123", "log.metrics_port=45123")
    with pytest.raises(ConfigError, match=r"log\.metrics_port=45123: scheduler.port uses this"):
        check(cfg)


def test_copy_without_its_backend_is_refused_before_start(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"journal\.copy_to=s3://bucket/runs: .*s3fs"):
        check(configure(model, "journal.copy_to=s3://bucket/runs"))


@pytest.mark.parametrize("role", ["scheduler", "learner", "envhub"])
def test_foreign_host_address_is_refused_by_key(role: str, model: Path) -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):
        cfg = configure(model, f"{role}.host={host}")
        with pytest.raises(
            ConfigError, match=rf"^{role}\.host={host}: not an address of this machine"
        ):
            check(cfg)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["actor.max_model_len=100000"],
            "actor.max_model_len=100000: the model supports 32768 pos",
        ),
        (["actor.kv_cache_blocks=1000000000"], "actor.kv_cache_blocks=1000000000: they need"),
        (["envhub.session_idle_s=2"], "envhub.session_idle_s=2: must be >= actor.turn_timeout"),
    ],
)
def test_impossible_engine_size_is_refused_before_start(
    overrides: list[str], words: str, model: Path
) -> None:
    budget = "learner.max_tokens_per_microbatch=100000"
    with pytest.raises(ConfigError) as caught:
        check(configure(model, budget, *overrides))
    assert str(caught.value).startswith(words)


def test_used_run_directory_is_refused_without_resume(model: Path) -> None:
    cfg = configure(model, "run.resume=never", "run.name=a")
    check(cfg)
    (model.parent / "runs" / "a" / "journal").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run\.resume=never"):
        check(cfg)
    check(configure(model, "run.name=a"))


def test_run_without_tasks_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        check(configure(model, "tasks=[]"))


def test_missing_program_is_named(model: Path) -> None:
    with pytest.raises(ConfigError, match="sciworld needs Java"):
        check(configure(model), missing=["sciworld needs Java: install it"])


def test_missing_sft_policy_error_names_its_command() -> None:
    output = "sft.output=runs/nosuch/policy"
    for told, how in (([], "--config tiny"), ([output], "the same --config")):
        cfg = load_config("smoke", ["model.path=runs/nosuch/policy", *told])
        with pytest.raises(ConfigError, match=f"no such directory; .* with {how} makes one"):
            check(cfg)


def test_missing_policy_error_names_the_preset_that_makes_it() -> None:
    with pytest.raises(ConfigError, match=r"`python run\.py sft` with --config tiny-expert makes"):
        check_model("runs/tiny-expert/policy")


def test_missing_reference_model_is_refused(model: Path) -> None:
    where = "algorithm.reference_path=/nosuch"
    check(configure(model, where))  # Without a KL term it is not loaded.
    with pytest.raises(ConfigError, match=r"^algorithm\.reference_path=/nosuch: no such directory"):
        check(configure(model, where, "algorithm.kl_coef=0.1"))


def test_missing_compiler_error_names_the_package(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiler_problem() == ""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"the C\+\+ compiler 'no-such-compiler'.*g\+\+"):
        check(configure(model))
    no_engine = "actor.num_actors=0"
    check(configure(model, no_engine))
    with pytest.raises(ConfigError, match=r"^learner\.compile=true needs a compiler: .*g\+\+"):
        check(configure(model, no_engine, "learner.compile=true"))


def test_missing_library_is_named() -> None:
    assert library_problem() == ""
    assert "libno-such.so.7" in library_problem("libno-such.so.7")


def test_answer_about_a_compiler_follows_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiler_problem() == ""
    with monkeypatch.context() as other:
        other.setenv("PATH", str(tmp_path))
        assert "is not installed" in compiler_problem()
    assert compiler_problem() == ""


@pytest.mark.skipif(has_cuda(), reason="a GPU answers here")
def test_missing_gpu_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.device=cuda: nvidia-smi lists no GPU"):
        check_devices(configure(model, "learner.device=cuda"))


def test_run_directory_has_one_launcher(tmp_path: Path) -> None:
    with (
        hold_run(tmp_path, name="a"),
        pytest.raises(ConfigError, match=r"run\.name=a: this run is already running"),
        hold_run(tmp_path, name="a"),
    ):
        pass
    with hold_run(tmp_path, name="a"):
        pass


def test_key_of_a_dataset_without_its_task_is_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unread_keys(load_config("smoke", ["reward=x.py:f", "data.eval_size=3"]))
    named = [each.getMessage().partition(" has no effect")[0] for each in caplog.records]
    assert named == ["data.eval_size=3", "reward=x.py:f"]
    caplog.clear()
    warn_of_unread_keys(load_config("dataset", ["reward=x.py:f"]))
    warn_of_unread_keys(load_config("smoke", []))
    # The documented commands of TextWorld, TextArena and BFCL take the preset with other tasks.
    warn_of_unread_keys(load_config("dataset", ["tasks=[{env: textworld, subset: custom}]"]))
    assert caplog.records == []
