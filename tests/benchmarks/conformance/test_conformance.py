"""Laws of the model families: the scores of transformers in every form, and the page of them."""

import io
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from actor.engine.process_watch import kernel_hint
from benchmarks.conformance.learner_side import (
    SEQUENCES,
    LearnerSide,
    gap_of,
    load_plain,
    mean_gap_of,
    passes_of,
    plain_scores,
)
from benchmarks.conformance.networks import perturb, save_network, stored, tiny_config
from benchmarks.conformance.page import PAGE, page_text
from benchmarks.conformance.part_results import (
    PARTS,
    TOLERANCE,
    FamilyResult,
    PartResult,
    Unmeasured,
    Verdict,
    append,
    compared,
    engine_failure,
    read,
    rounded,
)
from benchmarks.conformance.sharded import RankPair
from benchmarks.conformance.suite import (
    PUBLISHED,
    RESULTS,
    examine_apart,
    report,
    run_layouts,
    run_suite,
    short_commit,
)
from benchmarks.suite import Suite
from common.config.learner import Layout, Precision
from common.repository import ROOT
from learner.policy.model import load_policy
from tests.marks import long_for

# Families with their peculiarity.
ROUNDING = 0.1  # nats; mean difference of scores in bf16.
TEN = {
    "qwen2": "Biases of attention",
    "qwen3": "Norms of queries and keys",
    "llama": "the plain form",
    "mistral": "One sliding window for all layers",
    "gemma3_text": "Scaled embedding, two rotary embeddings, sliding windows",
    "gemma2": "Capped logits",
    "cohere": "Scaled logits, blocks in parallel",
    "granite": "Four factors",
    "glm4": "Rotary embedding of half a head",
    "phi3": "Fused projections",
}
USUAL = {"qwen3", "gemma3_text", "gemma2", "phi3"}  # The others run with `make test-long`.


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with RankPair(method="fork") as both:  # The process has the imports, and torch one thread.
        yield both
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("family", long_for(TEN, TEN.keys() - USUAL))
def test_learner_scores_equal_the_networks_own(family: str, tmp_path: Path, pair: RankPair) -> None:
    side = LearnerSide(save_network(family, tmp_path / "start"), tmp_path, pair=pair)
    side.examine()
    found = side.findings
    assert found.keys() == set(PARTS) - {"rollout", "publish", "published layout"}
    layout = [found.pop(name) for name in ("packed", "shared prefix")]
    assert {each.verdict for each in found.values()} == {Verdict.RIGHT}, found
    for each in layout:
        assert (each.verdict, each.message) == (Verdict.RIGHT, ""), TEN[family]


@pytest.mark.slow
def test_nested_blocks_are_sharded_from_the_inside(tmp_path: Path, pair: RankPair) -> None:
    start = str(save_network("mamba", tmp_path))
    gap = gap_of(pair.score(start, SEQUENCES), plain_scores(load_plain(start)))
    assert gap <= TOLERANCE


@contextmanager
def seen_dtypes() -> Iterator[dict[str, torch.dtype]]:
    """Yield the dtypes of parameters by class and name, as the forward passes of modules see them.

    Parameters outside their module's pass are shards, which do not count.
    """
    seen: dict[str, torch.dtype] = {}

    def note(module: nn.Module, _: object) -> None:
        for name, each in module.named_parameters(recurse=False):
            if not isinstance(each, DTensor):
                seen[f"{type(module).__name__}.{name}"] = each.dtype

    handle = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "deepseek_v3"])
def test_ranks_compute_vectors_in_fp32(family: str, tmp_path: Path, pair: RankPair) -> None:
    start = str(save_network(family, tmp_path))
    with seen_dtypes() as seen:
        scores = pair.score(start, SEQUENCES, Precision.BF16)
    plain = plain_scores(load_plain(start))
    assert mean_gap_of(scores, plain) < ROUNDING
    exact = {name for name, dtype in seen.items() if dtype is torch.float32}
    mixer = {f"Mamba2Mixer.{name}" for name in ("A_log", "D", "dt_bias")}
    own = {"mamba2": mixer, "deepseek_v3": {"DeepseekV3TopkRouter.weight"}}
    assert own[family] <= exact
    assert any("Norm" in name for name in exact)
    assert seen["Linear.weight"] is torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama4_text", "opt"])
def test_network_with_another_trunk_is_scored_right(family: str, tmp_path: Path) -> None:
    # The trunk of Llama 4 has no name in the class; OPT's forward pass calls a part of its trunk.
    start = str(save_network(family, tmp_path))
    policy = load_policy(start, device="cpu")
    passes = passes_of(policy, Layout.PADDED)
    passes.check_start(may_pad=False)
    gap = gap_of(passes.score_sequences(SEQUENCES), plain_scores(load_plain(start)))
    assert gap <= TOLERANCE


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_engine_scores_equal_the_learners(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    result = examine_apart(family, method="spawn")
    assert result.parts["rollout"].verdict is Verdict.RIGHT, result
    assert result.parts["publish"].verdict is Verdict.RIGHT, result
    assert result.gap <= TOLERANCE


@pytest.mark.slow
@pytest.mark.long
def test_no_family_is_silently_wrong(tmp_path: Path) -> None:
    suite = Suite(out=io.StringIO())
    results, published = (tmp_path / name for name in ("results.json", "published.json"))
    run_suite(suite, results=results, published=published, method="spawn")
    assert suite.failed == [], suite.notes


@pytest.mark.slow
def test_layouts_are_measured_again_without_the_other_parts(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    earlier = replace(
        result_of(full=Verdict.RIGHT, packed=Verdict.REFUSED, rollout=Verdict.NO_KERNEL),
        family="lfm2",
        commit="abc",
    )
    append(path, earlier)
    files = {"results": path, "published": tmp_path / "published.json"}
    run_layouts(Suite(out=io.StringIO()), only=["lfm2"], method="spawn", **files)
    found = read(path)["lfm2"]
    assert {name: each.verdict for name, each in found.parts.items()} == {
        "full": Verdict.RIGHT,
        "packed": Verdict.RIGHT,
        "shared prefix": Verdict.RIGHT,
        "rollout": Verdict.NO_KERNEL,
    }
    assert (found.commit, found.layouts_commit) == ("abc", short_commit())
    assert f"of 1 rows are from commit {short_commit()}" in page_text({"lfm2": found})


def test_page_is_written_from_the_results() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page_text(read(RESULTS), read(PUBLISHED))


def test_small_network_has_every_kind_of_layer() -> None:
    # Gemma 3 has five layers with a window before each one without.
    config = tiny_config("gemma3_text")
    assert config.layer_types == [*["sliding_attention"] * 5, "full_attention"]
    assert config.num_hidden_layers == 6
    assert config.sliding_window == 16
    assert tiny_config("deepseek_v3").num_key_value_heads == 4, "one key head for each query head"


def test_weights_without_a_gradient_change_too() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model.register_buffer("correction", torch.zeros(2))
    model.register_buffer("table", torch.zeros(2, dtype=torch.int64))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    perturb(stored(model), seed=1)
    after = model.state_dict()
    changed = {name for name, each in before.items() if not torch.equal(each, after[name])}
    assert changed == {"weight", "bias", "correction"}


def test_row_names_the_code_that_was_measured() -> None:
    libraries = {"torch": "2.1", "vllm": "0.3"}
    rows = {
        "a": FamilyResult(family="a", architecture="A", commit="12345678", libraries=libraries),
        "b": FamilyResult(family="b", architecture="B", commit="12345678", libraries=libraries),
        "c": FamilyResult(family="c", architecture="C"),
    }
    text = page_text(rows)
    assert "The rows are from commit 12345678 with torch 2.1, vllm 0.3.\n" in text
    assert "From an older commit: `c`.\n" in text
    assert "From " not in page_text({"a": rows["a"]}), "one line if all rows are from one commit"


def test_largest_difference_decides_a_finding() -> None:
    assert compared(1e-4).verdict is Verdict.RIGHT
    assert compared(2e-4).verdict is Verdict.WRONG
    assert compared(float("nan")).verdict is Verdict.WRONG
    expected = [[-1.0, -2.0], [-4.0]]
    assert gap_of([[-1.25, -2.0], [-4.125]], expected) == 0.25
    for broken in ([[math.nan, -2.0], [-4.0]], [[-1.0, -2.0], [math.nan]]):
        assert math.isnan(gap_of(broken, expected))


def test_mean_difference_decides_in_bf16() -> None:
    assert rounded(0.1).verdict is Verdict.ROUNDED
    assert rounded(0.11).verdict is Verdict.WRONG
    assert rounded(float("nan")).verdict is Verdict.WRONG
    expected = [[-1.0, -2.0, -3.0], [-4.0]]
    assert mean_gap_of([[-1.25, -2.0, -2.75], [-4.5]], expected) == 0.25  # (.25 + .25 + .5) / 4
    assert math.isnan(mean_gap_of([[-1.0, -2.0, -3.0], [math.nan]], expected))


def test_family_in_bf16_is_right_in_bf16_only() -> None:
    parts = {
        "full": PartResult(verdict=Verdict.RIGHT, gap=2e-6),
        "rollout": replace(rounded(0.0125), message="vLLM has no fp32"),
        "publish": rounded(0.25),
    }
    wrong = FamilyResult(family="f", architecture="F", parts=parts)
    assert wrong.verdict is Verdict.WRONG, "the version was not loaded"
    found = replace(wrong, parts=parts | {"publish": rounded(0.05)})
    assert found.verdict is Verdict.ROUNDED
    assert found.gap == 2e-6, "rounding is no difference"
    text = page_text({"f": found})
    assert "| right (bf16) | - | right |" in text
    assert "rollout: vLLM has no fp32<br>rollout: 0.013 nats<br>publish: 0.05 nats |" in text
    assert "1 families: 1 right in bf16." in text


def result_of(**parts: Verdict) -> FamilyResult:
    found = {name: PartResult(verdict=each, gap=3e-6) for name, each in parts.items()}
    return FamilyResult(family="f", architecture="F", parts=found)


def test_wrong_part_makes_a_family_wrong() -> None:
    right = Verdict.RIGHT
    whole = dict.fromkeys(PARTS, right)
    assert result_of(**whole).verdict is right
    assert result_of(full=right, rollout=right).verdict is Verdict.PARTLY, "parts are missing"
    assert result_of(**whole | {"packed": Verdict.REFUSED}).verdict is Verdict.PARTLY
    assert result_of(**whole | {"lora": Verdict.WRONG}).verdict is Verdict.WRONG
    assert result_of(full=right, lora=Verdict.WRONG).verdict is Verdict.WRONG
    assert result_of(full=Verdict.REFUSED).verdict is Verdict.REFUSED
    for verdict in (Verdict.NO_KERNEL, Verdict.REJECTED):
        assert result_of(full=right, rollout=verdict).verdict is verdict


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("NotImplementedError: Sparse Attention is not supported on CPU.", Verdict.NO_KERNEL),
        ("ModuleNotFoundError: No module named 'cutlass'", Verdict.NO_KERNEL),
        ("AttributeError: '_OpNamespace' '_C' object has no attribute 'f'", Verdict.NO_KERNEL),
        ("AttributeError: 'HYV3Config' object has no attribute 'route_norm'", Verdict.REJECTED),
        ("KeyError: 'layers.1.mlp.experts.down_proj'", Verdict.REJECTED),
    ],
)
def test_missing_kernel_is_no_rejected_config(message: str, verdict: Verdict) -> None:
    found = engine_failure(message)
    assert (found.verdict, found.message) == (verdict, message)
    assert bool(kernel_hint(message)) is (verdict is Verdict.NO_KERNEL)


def test_unexamined_part_is_counted_in_the_last_line() -> None:
    suite = Suite(out=io.StringIO())
    report(suite, result_of(full=Verdict.RIGHT))
    message = "no result within 600 s"
    not_run = PartResult(verdict=Verdict.NOT_RUN, message=message)
    report(suite, FamilyResult(family="g", architecture="G", parts={"full": not_run}))
    assert suite.finish() == 0
    assert isinstance(suite.out, io.StringIO)
    lines = suite.out.getvalue().splitlines()
    assert lines[-1] == "measured, nothing was promised; 1 not measured"
    assert lines[-2] == f"note  g: not run: full. {message}"


@pytest.mark.slow
def test_family_beyond_its_time_limit_is_examined_by_the_next_run(tmp_path: Path) -> None:
    suite = Suite(out=io.StringIO())
    results, published = (tmp_path / name for name in ("results.json", "published.json"))
    earlier = replace(result_of(full=Verdict.RIGHT), family="llama")
    append(results, earlier)
    files = {"results": results, "published": published}
    run_suite(suite, only=["qwen3", "llama"], method="spawn", limit_s=0.0, **files)
    assert [note["name"] for note in suite.notes] == ["llama", "qwen3"]
    assert {note["text"] for note in suite.notes} == {"not run: no result within 0 s"}
    assert suite.num_not_measured == 2
    assert read(results) == {"llama": earlier}


@pytest.mark.parametrize(
    "message",
    [
        "TimeoutError: ",
        "no first token within 240 s",
        "OSError: [Errno 28] No space left on device",
    ],
)
def test_limit_of_the_machine_is_no_rejected_config(message: str) -> None:
    with pytest.raises(Unmeasured, match=re.escape(message)):
        engine_failure(message)


def test_newest_result_of_a_family_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert read(path) == {}
    append(path, result_of(full=Verdict.WRONG))
    append(path, result_of(full=Verdict.RIGHT))
    assert read(path) == {"f": result_of(full=Verdict.RIGHT)}
    assert all(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def test_page_shows_padding_and_messages() -> None:
    parts = {
        "full": PartResult(verdict=Verdict.RIGHT, gap=2e-6),
        "packed": PartResult(verdict=Verdict.REFUSED, message="learner.layout=packed: f | g"),
        "publish": PartResult(verdict=Verdict.WRONG, gap=0.5),
    }
    text = page_text({"f": FamilyResult(family="f", architecture="F", parts=parts)})
    row = next(line for line in text.splitlines() if line.startswith("| `f`"))
    cells = [each.strip() for each in row.replace("\\|", "/").strip("|").split("|")]
    assert cells[3] == "right"
    assert cells[6] == "padded"
    assert cells[9] == "**wrong**"
    assert cells[11] == "-"
    assert cells[12] == "2e-06"
    assert cells[13] == "packed: learner.layout=packed: f / g<br>publish: 0.5 nats"
    assert "1 families: 1 wrong. 1 of them were measured without an engine so far." in text
