"""Laws of the memory plan, with numbers computed by hand."""

import re
from pathlib import Path

import pytest

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import GIB, Gpu
from learner.policy.model_shape import ModelShape, read_shape
from tests.tools.checks.models import write_model
from tools.checks.memory_plan import (
    MemoryBudget,
    check_memory,
    lines_here,
    make_plan,
    plan_lines,
    with_activation_room,
)
from tools.checks.preflight import check_devices

NUM_PARAMS = 494_032_768  # Qwen2.5-0.5B, its tied head counted once
H100 = Gpu(name="H100", memory_bytes=80 * GIB)


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    return read_shape(write_model(tmp_path / "model"))


def configure(*overrides: str) -> RunConfig:
    fixed = ["model.path=unset", "model.dtype=bfloat16", "learner.optimizer=adamw"]
    return load_config("smoke", [*fixed, *overrides])


def sizes(place: MemoryBudget) -> dict[str, int]:
    return {part.label: part.num_bytes for part in place.parts}


def test_parameters_are_counted_from_the_weight_headers(shape: ModelShape) -> None:
    assert shape.num_params == NUM_PARAMS
    assert shape.kv_bytes_per_token("bfloat16") == 2 * 24 * 2 * 64 * 2
    assert shape.context_tokens == 32_768


def test_learner_and_engine_share_the_host_memory(shape: ModelShape) -> None:
    (host,) = make_plan(configure(), shape, on=(), host_bytes=64 * GIB)
    num_bytes = sizes(host)
    assert num_bytes["learner weights"] == num_bytes["gradients"] == 4 * NUM_PARAMS
    assert num_bytes["optimizer"] == 8 * NUM_PARAMS
    assert num_bytes["engine weights"] == num_bytes["incoming weights"] == 2 * NUM_PARAMS
    assert num_bytes["KV cache"] == 1 * GIB
    chunk = 2 * 1024 * 151_936  # One buffer; while it exists, no layer is computed again.
    assert 0.5 * chunk < num_bytes["logits"] <= chunk
    assert "reference" not in num_bytes


def test_plan_includes_reference_and_critic_when_used(shape: ModelShape) -> None:
    more = ["algorithm.kl_coef=0.1", "algorithm.advantage=ppo", "learner.critic.kind=model"]
    (host,) = make_plan(configure(*more), shape, on=(), host_bytes=0)
    assert sizes(host)["reference"] == 4 * NUM_PARAMS
    assert sizes(host)["critic"] == 16 * NUM_PARAMS


def test_eight_bit_moments_quarter_the_optimizer_memory(shape: ModelShape) -> None:
    more = ["learner.moments=8bit", "algorithm.advantage=ppo", "learner.critic.kind=model"]
    (host,) = make_plan(configure(*more), shape, on=(), host_bytes=0)
    kept = 2 * NUM_PARAMS + 2 * 4 * NUM_PARAMS // 256  # bytes, and scales of 256
    assert sizes(host)["optimizer"] == kept
    assert sizes(host)["critic"] == 8 * NUM_PARAMS + kept


def test_kv_cache_gets_remaining_engine_memory(shape: ModelShape) -> None:
    cfg = configure("learner.device=auto", "actor.gpu_memory_frac=0.5")
    gpu, host = make_plan(cfg, shape, on=(H100,), host_bytes=64 * GIB)
    num_bytes = sizes(gpu)
    parts = ("engine weights", "engine work space", "KV cache")
    assert sum(num_bytes[part] for part in parts) == 40 * GIB
    assert num_bytes["learner weights"] == 4 * NUM_PARAMS
    assert sizes(host)["checkpoint copies"] == 12 * NUM_PARAMS  # weights and moments
    assert [*sizes(host)] == ["checkpoint copies", "programs"]


def engine_on_gpu(shape: ModelShape, *overrides: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parts of a GPU and of the host; the engine may use half of 80 GiB."""
    cfg = configure("learner.device=auto", "actor.gpu_memory_frac=0.5", *overrides)
    gpu, host = make_plan(cfg, shape, on=(H100,), host_bytes=64 * GIB)
    return sizes(gpu), sizes(host)


TABLES = 2 * 151_936 * 896  # embedding and head


def test_arguments_of_vllm_change_the_engines_parts(shape: ModelShape) -> None:
    args = "actor.engine_args."
    found, _ = engine_on_gpu(shape, f"{args}quantization=fp8")
    assert found["engine weights"] == 2 * TABLES + (NUM_PARAMS - TABLES)
    assert found["KV cache"] == 40 * GIB - 3 * GIB // 2 - found["engine weights"]
    found, _ = engine_on_gpu(shape, f"{args}kv_cache_memory_bytes={5 * GIB}")
    assert found["KV cache"] == 5 * GIB
    more = (f"{args}cpu_offload_gb=0.25", f"{args}kv_offloading_size=3.0")
    found, host = engine_on_gpu(shape, *more)
    assert found["engine weights"] == 2 * NUM_PARAMS - GIB // 4
    assert host["offloaded weights"] == GIB // 4
    assert host["offloaded KV cache"] == 3 * GIB


@pytest.mark.parametrize(("dtype", "num_bytes"), [("auto", 2), ("fp8", 1), ("fp8_e5m2", 1)])
def test_cache_of_another_dtype_holds_more_tokens(
    shape: ModelShape, dtype: str, num_bytes: int
) -> None:
    cfg = configure(f"actor.engine_args.kv_cache_dtype={dtype}")
    (host,) = make_plan(cfg, shape, on=(), host_bytes=0)
    (cache,) = [part for part in host.parts if part.label == "KV cache"]
    each = 2 * 24 * 2 * 64 * num_bytes
    assert f"{GIB // each:,} tokens of {each:,} B" in cache.formula


def test_plan_names_arguments_of_vllm_that_it_cannot_count() -> None:
    cfg = load_config(
        "smoke",
        [
            "actor.engine_args.kv_cache_dtype=nvfp4",
            "actor.engine_args.block_size=64",
            "actor.engine_args.quantization=fp8",
            "actor.engine_args.max_num_batched_tokens=4096",
        ],
    )
    assert lines_here(cfg)[-1] == (
        "memory, not counted: actor.engine_args.kv_cache_dtype=nvfp4,"
        " actor.engine_args.max_num_batched_tokens=4096"
    )


SLEEPS = ["learner.device=auto", "train.mode=sync", "actor.placement=colocated"]


@pytest.mark.parametrize(("engine_frac", "is_sampling_larger"), [(0.5, True), (0.05, False)])
def test_sleeping_engine_and_step_share_one_budget(
    shape: ModelShape, engine_frac: float, is_sampling_larger: bool
) -> None:
    share = f"actor.gpu_memory_frac={engine_frac}"
    cfg = configure(*SLEEPS, share, "actor.sleep=1")
    gpu, host = make_plan(cfg, shape, on=(H100,), host_bytes=64 * GIB)
    num_bytes = sizes(gpu)
    bucket_bytes = min(cfg.learner.publish_bucket_mb << 20, 2 * NUM_PARAMS)
    kept = (4 + 8) * NUM_PARAMS + 2 * GIB + 2 * bucket_bytes  # weights, moments, work, buckets
    sampling = int(engine_frac * 80 * GIB)
    step = 4 * NUM_PARAMS + num_bytes["activations"] + num_bytes["logits"] + 3 * GIB // 2
    step += num_bytes.get("bf16 copies of the weights", 0)
    assert (sampling > step) is is_sampling_larger
    assert gpu.total_bytes == kept + max(sampling, step)
    assert sizes(host)["engine weights"] == 2 * NUM_PARAMS  # in host memory during the step
    awake = make_plan(configure(*SLEEPS, share), shape, on=(H100,), host_bytes=0)[0]
    assert awake.total_bytes == kept + sampling + step - 3 * GIB // 2


def test_engine_that_keeps_nothing_needs_no_host_memory(shape: ModelShape) -> None:
    cfg = configure(*SLEEPS, "actor.sleep=2")
    gpu, host = make_plan(cfg, shape, on=(H100,), host_bytes=64 * GIB)
    assert "engine weights" not in sizes(host)
    assert "; only while sampling" in "\n".join(plan_lines([gpu]))


def test_cpu_workers_share_one_incoming_version(shape: ModelShape) -> None:
    one, two = (
        make_plan(configure(wide), shape, on=(), host_bytes=0)[0]
        for wide in ("actor.num_actors=1", "actor.tensor_parallel_size=2")
    )
    for label in ("engine weights", "incoming weights"):
        assert sizes(two)[label] == sizes(one)[label]
    assert sizes(two)["KV cache"] == 2 * sizes(one)["KV cache"]
    assert sizes(two)["shared version"] == 2 * NUM_PARAMS
    assert sizes(one)["shared version"] == 2 * NUM_PARAMS, "that of the learner"
    apart = configure("actor.num_actors=1", "learner.weights_transport=gloo")
    assert "shared version" not in sizes(make_plan(apart, shape, on=(), host_bytes=0)[0])
    assert sizes(two)["programs"] == sizes(one)["programs"] + 2 * GIB  # workers beside the engine


def test_engines_of_one_process_share_its_program_only(shape: ModelShape) -> None:
    one, apart, together = (
        sizes(make_plan(configure(*each), shape, on=(), host_bytes=0)[0])
        for each in ([], ["actor.num_actors=3"], ["actor.engines_per_process=3"])
    )
    for label in ("engine weights", "incoming weights", "KV cache"):
        assert together[label] == apart[label] == 3 * one[label]
    assert apart["programs"] == one["programs"] + 4 * GIB  # Two actors and two engines.
    assert together["programs"] == one["programs"] + 2 * GIB  # Two engines.


def test_process_on_gpus_of_two_nodes_is_refused(shape: ModelShape) -> None:
    overrides = ["learner.device=cuda", "learner.num_ranks=2", "actor.engines_per_process=3"]
    with pytest.raises(ConfigError, match=re.escape("actor.engines_per_process=3: the engines of")):
        make_plan(configure(*overrides), shape, on=(H100,) * 8, host_bytes=0, num_nodes=2)


def test_changes_need_copies_at_learner_and_workers(shape: ModelShape) -> None:
    changes = ["learner.publish=delta", "actor.tensor_parallel_size=2"]
    (host,) = make_plan(configure(*changes), shape, on=(), host_bytes=0)
    assert sizes(host)["publish copies"] == 2 * 2 * NUM_PARAMS, "a version and its changes"
    assert sizes(host)["shared version"] == 2 * NUM_PARAMS, "the workers keep one copy together"
    one = configure(changes[0], "learner.weights_transport=gloo")
    (host,) = make_plan(one, shape, on=(), host_bytes=0)
    assert sizes(host)["kept version"] == 2 * NUM_PARAMS
    whole = make_plan(configure(), shape, on=(), host_bytes=0)[0]
    assert sizes(whole).keys().isdisjoint({"publish copies", "kept version"})


def test_ranks_and_engine_workers_get_own_gpus(shape: ModelShape) -> None:
    more = ["learner.device=cuda", "learner.num_ranks=2", "actor.tensor_parallel_size=2"]
    places = make_plan(configure(*more), shape, on=(H100, H100), host_bytes=0)
    assert [place.name for place in places] == ["gpu 0 (H100)", "gpu 1 (H100)", "host"]
    assert sizes(places[1])["engine weights"] == NUM_PARAMS


def test_ranks_share_state_and_rank_0_publishes(shape: ModelShape) -> None:
    more = ["learner.device=cuda", "learner.num_ranks=4", "actor.num_actors=0"]
    places = make_plan(configure(*more), shape, on=(), host_bytes=0)
    first, *others, host = [sizes(place) for place in places]
    assert first["learner weights"] == first["gradients"] == NUM_PARAMS
    assert first["optimizer"] == 2 * NUM_PARAMS
    tables = 2 * 151_936 * 896
    blocks = 2 * ((NUM_PARAMS - tables) // 24)
    assert first["gathered weights"] == 2 * (tables + blocks)
    assert first.pop("publish buckets") == 2 * (256 << 20)
    assert others == [first] * 3
    assert host["checkpoint copies"] == 12 * NUM_PARAMS


def test_experts_that_ranks_divide_are_not_gathered(tmp_path: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 512}
    path = write_model(tmp_path / "model", num_rest=900_000_000, num_experts_per_tok=4, **experts)
    shape = read_shape(path)
    more = ["learner.device=cuda", "learner.num_ranks=4", "actor.num_actors=0"]
    more += ["learner.activations=recompute", "learner.max_tokens_per_microbatch=8192"]
    num_experts = 3 * 24 * 16 * 896 * 512
    tables = 2 * 151_936 * 896
    for width in (4, 2):
        cfg = configure(*more, f"learner.expert_ranks={width}")
        num_bytes = sizes(make_plan(cfg, shape, on=(), host_bytes=0)[0])
        share = (shape.num_params - num_experts) / 4 + num_experts / width
        assert num_bytes["learner weights"] == pytest.approx(4 * share, abs=4)
        assert num_bytes["optimizer"] == pytest.approx(8 * share, abs=4)
        block = (shape.num_params - tables - num_experts) // 24
        assert num_bytes["gathered weights"] == 2 * (tables + 2 * block)
        assert num_bytes["tokens of other ranks"] == 2 * width * 8192 * 896 * 2
        assert num_bytes["experts in bf16"] == 2 * (num_experts // width // 24)
    gathered = sizes(make_plan(configure(*more), shape, on=(), host_bytes=0)[0])
    assert gathered["gathered weights"] == 2 * (tables + 2 * ((shape.num_params - tables) // 24))


def test_reference_of_one_gpu_has_its_table_in_fp32(shape: ModelShape) -> None:
    cfg = configure("learner.device=cuda", "algorithm.kl_coef=0.1")
    (gpu, *_) = make_plan(cfg, shape, on=(H100,), host_bytes=0)
    assert sizes(gpu)["reference"] == 2 * NUM_PARAMS
    assert sizes(gpu)["reference table"] == 2 * 151_936 * 896


def test_offload_keeps_one_block_on_the_gpu(shape: ModelShape) -> None:
    more = ["learner.device=cuda", "learner.offload=optimizer", "algorithm.kl_coef=0.1"]
    gpu, host = make_plan(configure(*more), shape, on=(H100,), host_bytes=0)
    found, kept = sizes(gpu), sizes(host)
    assert kept["learner weights"] == kept["gradients"] == 4 * NUM_PARAMS
    assert kept["optimizer"] == 8 * NUM_PARAMS
    assert kept["reference"] == 2 * NUM_PARAMS
    assert found.keys() & kept.keys() == set()
    tables = 2 * 151_936 * 896
    assert found["gathered weights"] == 2 * (tables + 2 * ((NUM_PARAMS - tables) // 24))
    assert found["weights in transfer"] == 10 * tables  # a gradient in bf16, twice in fp32
    two = make_plan(configure(*more, "learner.num_ranks=2"), shape, on=(H100,) * 2, host_bytes=0)
    assert sizes(two[-1])["optimizer"] == 8 * NUM_PARAMS


def test_divided_rows_need_the_memory_of_a_slice(shape: ModelShape) -> None:
    more = ["learner.device=cuda", "actor.num_actors=0", "learner.num_ranks=4"]
    more += ["actor.max_model_len=16384", "learner.max_tokens_per_microbatch=4096"]
    found: dict[int, int] = {}
    for ranks in (1, 2, 4):
        cfg = configure(*more, f"learner.sequence_ranks={ranks}")
        gpu, *_ = make_plan(cfg, shape, on=(H100,) * 4, host_bytes=0)
        found[ranks] = sizes(gpu)["activations"]
    assert found[1] == 2 * found[2] == 4 * found[4]  # 16384, 8192 and 4096 tokens


def test_activations_get_the_room_that_the_plan_leaves(shape: ModelShape) -> None:
    more = ["learner.device=cuda", "actor.num_actors=0", "actor.max_model_len=16384"]
    cfg = configure(*more, "learner.max_tokens_per_microbatch=16384")
    formulas: dict[int, str] = {}
    for gib in (80, 24, 14):
        gpu = Gpu(name="", memory_bytes=gib * GIB)
        place, *_ = make_plan(cfg, shape, on=(gpu,), host_bytes=0)
        (part,) = (part for part in place.parts if part.label == "activations")
        formulas[gib] = part.formula
        settled = with_activation_room(cfg, shape, on=(gpu,), host_bytes=0)
        budget = settled.learner.activation_gib * GIB
        assert (budget == 0) == (gib == 80)
        if gib == 24:
            assert part.num_bytes <= budget
            assert place.total_bytes <= 0.95 * gpu.memory_bytes
    assert "24 layers x" in formulas[80]
    assert "inputs x" in formulas[24]
    assert "in host memory" not in formulas[24]
    assert "24 inputs x 3,584 B in host memory" in formulas[14]


def test_critic_of_its_own_has_activations_too(shape: ModelShape) -> None:
    more = ["algorithm.advantage=ppo", "learner.critic.kind=model", "learner.activations=offload"]
    (host,) = make_plan(configure(*more), shape, on=(), host_bytes=0)
    num_bytes = sizes(host)
    assert num_bytes["activations of the critic"] == num_bytes["activations"]
    tokens = configure(*more).learner.max_tokens_per_microbatch
    assert num_bytes["layer inputs"] == 2 * 24 * tokens * 896 * 4


def test_fused_attention_stores_no_scores_on_a_cpu(shape: ModelShape) -> None:
    label = "attention scores, at most"
    for attention, is_planned in (("auto", True), ("products", True), ("fused", False)):
        cfg = configure(f"learner.attention={attention}")
        (host,) = make_plan(cfg, shape, on=(), host_bytes=0)
        assert (label in sizes(host)) == is_planned


def test_scores_of_a_capped_attention_take_memory_on_a_gpu(tmp_path: Path) -> None:
    cfg = configure("learner.device=cuda")
    label = "attention scores, at most"
    for cap in (None, 50.0):
        capped = read_shape(write_model(tmp_path / f"{cap}", attn_logit_softcapping=cap))
        gpu, *_ = make_plan(cfg, capped, on=(H100,), host_bytes=0)
        assert (label in sizes(gpu)) == (cap is not None)


def test_small_gpu_is_refused_with_offload_estimate(shape: ModelShape) -> None:
    told = ["learner.device=cuda", "actor.num_actors=0", "learner.max_tokens_per_microbatch=2048"]
    told += ["learner.activations=keep"]
    cfg = configure(*told)
    small = Gpu(name="small", memory_bytes=11 * GIB)
    places = make_plan(cfg, shape, on=(small,), host_bytes=64 * GIB)
    remedy = r"offload=optimizer would need about ([\d.]+) GiB of GPU memory and ([\d.]+) GiB of"
    with pytest.raises(ConfigError, match=remedy + " host memory, which has 64") as refused:
        check_memory(cfg, places, shape)
    found = re.search(remedy, str(refused.value))
    assert found is not None
    gpu_gib, host_gib = map(float, found.groups())
    assert 5 < gpu_gib < 11
    assert host_gib == pytest.approx((16 + 12) * NUM_PARAMS / GIB, abs=0.1)
    other = configure(*told, "learner.offload=optimizer")
    check_memory(other, make_plan(other, shape, on=(small,), host_bytes=64 * GIB), shape)
    tiny = Gpu(name="tiny", memory_bytes=4 * GIB)  # where it would not help, it is not named
    with pytest.raises(ConfigError) as hopeless:
        check_memory(cfg, make_plan(cfg, shape, on=(tiny,), host_bytes=64 * GIB), shape)
    assert "learner.offload" not in str(hopeless.value)


@pytest.mark.parametrize(
    ("device", "more", "words"),
    [
        ("auto", ["optimizer=muon"], "muon would multiply its matrices on the CPU"),
        (
            "auto",
            ["optimizer=adamw", "moments=8bit"],
            "must be fp32 with learner.offload=optimizer",
        ),
        ("cpu", [], "must be none with learner.device=cpu"),
    ],
)
def test_useless_offload_is_refused(device: str, more: list[str], words: str) -> None:
    given = [f"learner.{each}" for each in (f"device={device}", "offload=optimizer", *more)]
    with pytest.raises(ConfigError, match=words):
        load_config("smoke", given)


def test_offload_is_refused_on_cpu() -> None:
    cfg = configure("learner.device=auto", "learner.offload=optimizer")
    with pytest.raises(ConfigError, match=r"nvidia-smi lists no GPU.* learner\.offload=none"):
        check_devices(cfg)


def test_oversized_run_is_refused_with_a_remedy(shape: ModelShape) -> None:
    cfg = configure()
    places = make_plan(cfg, shape, on=(), host_bytes=8 * GIB)
    with pytest.raises(ConfigError, match=r"optimizer 3\.7 GiB = 494\.0M x 8 B.*lower learner\."):
        check_memory(cfg, places, shape)
    check_memory(cfg, make_plan(cfg, shape, on=(), host_bytes=64 * GIB), shape)


def test_missing_gpus_are_planned_without_a_verdict(shape: ModelShape) -> None:
    cfg = configure("learner.device=cuda")
    places = make_plan(cfg, shape, on=(), host_bytes=64 * GIB)
    check_memory(cfg, places, shape)
    assert plan_lines(places)[0].startswith("memory, gpu 0: about ")


def test_cache_below_one_episode_is_refused(shape: ModelShape) -> None:
    cfg = configure("actor.max_model_len=131072")
    places = make_plan(cfg, shape, on=(), host_bytes=900 * GIB)
    with pytest.raises(
        ConfigError, match=r"an episode of this length needs 1\.5 GiB.*actor\.kv_cache_gib"
    ):
        check_memory(cfg, places, shape)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": 8}'])
def test_non_transformer_config_is_refused_by_key(text: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^model\.path="):
        read_shape(folder)
