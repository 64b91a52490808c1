"""Laws of checkpoints for images or sound: the language model is loaded, trained and sent alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.conformance.learner_side import load_plain
from benchmarks.conformance.networks import (
    composite_architecture,
    perturb,
    save_composite,
    stored,
    trained,
)
from common.config.learner import CriticKind, CriticSection, LoraSection
from common.errors import ConfigError, LongstrideError
from learner.policy.composite import composite_class
from learner.policy.lora import has_adapters
from learner.policy.model import load_policy, make_bare, make_critic, parameter_count
from learner.policy.model_shape import INDEX, read_shape
from learner.policy.selfcheck import make_probe
from learner.training.checkpoint import export
from learner.weights.source import policy_weights
from tools.offline.scratch import save_policy

pytestmark = pytest.mark.slow

# The parts of the published names that belong to the language model.
TEXT = {
    "gemma3": ("language_model.model.",),  # Tied head.
    "gemma4": ("model.language_model.",),  # Tied head, towers for images and sound.
    "llama4": ("language_model.model.", "language_model.lm_head."),  # The head is inside.
    "mistral3": ("language_model.model.",),
    "qwen2_5_vl": ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
    "qwen2_audio": ("language_model.model.", "language_model.lm_head."),  # Reads a device.
    "qwen3_5": ("model.language_model.", "lm_head."),
    "voxtral": ("language_model.model.", "language_model.lm_head."),
}
IDS = torch.tensor([[5, 80, 41, 7, 200, 33, 90, 12]])


@pytest.fixture(scope="module", params=TEXT)
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_composite(request.param, tmp_path_factory.mktemp(request.param) / request.param)


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    return load_policy(str(folder), device="cpu", **options)


def tensors_in(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """Return (file, tensor) of every name in the weight files of a folder."""
    found: dict[str, tuple[str, Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            found |= {name: (path.name, file.get_tensor(name)) for name in names}
    return found


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def saved(policy: PreTrainedModel, folder: Path, *, start: Path) -> Path:
    return save_policy(folder, policy, AutoTokenizer.from_pretrained(start))


def test_language_model_computes_what_the_whole_does(start: Path) -> None:
    assert torch.equal(logits(loaded(start)), logits(load_plain(str(start))))


def test_towers_are_no_part_of_the_policy(start: Path) -> None:
    policy = loaded(start)
    published = tensors_in(start)
    text = {name for name in published if name.startswith(TEXT[start.name])}
    assert 0 < len(text) < len(published)
    num_text = sum(published[name][1].numel() for name in text)
    buffers = sum(t.numel() for name, t in policy.state_dict().items() if "layer_scalar" in name)
    assert parameter_count(policy) == num_text - buffers
    assert parameter_count(make_bare(str(start))) == parameter_count(policy)
    shape = read_shape(start)
    assert shape.num_params == num_text
    assert shape.num_unused == sum(t.numel() for _, t in published.values()) - num_text


def test_versions_have_the_names_of_the_published_files(start: Path) -> None:
    names = {spec.name for spec in policy_weights(loaded(start), torch.bfloat16).specs}
    assert names == {name for name in tensors_in(start) if name.startswith(TEXT[start.name])}


def test_checkpoint_is_the_published_one_with_other_text_weights(
    start: Path, tmp_path: Path
) -> None:
    policy = loaded(start)
    perturb(stored(policy), seed=9)
    written = saved(policy, tmp_path / "written", start=start)
    assert {each.name for each in written.iterdir()} == {each.name for each in start.iterdir()}
    before = tensors_in(start)
    after = tensors_in(written)
    assert {name: file for name, (file, _) in before.items()} == {
        name: file for name, (file, _) in after.items()
    }
    for name, (_, tensor) in before.items():
        is_text = name.startswith(TEXT[start.name])
        assert torch.equal(tensor, after[name][1]) is not is_text, name
        assert tensor.dtype is after[name][1].dtype
    for path in start.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX:
            assert path.read_bytes() == (written / path.name).read_bytes(), path.name
    kind: Any = getattr(transformers, composite_architecture(start.name))
    again, report = kind.from_pretrained(
        written, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(logits(again.eval()), logits(policy))


def test_adapters_change_the_language_model_only(start: Path, tmp_path: Path) -> None:
    lora = LoraSection(rank=2, alpha=4.0, targets=["q_proj", "v_proj"])
    policy = loaded(start, lora=lora)
    assert has_adapters(policy)
    perturb(trained(policy), seed=2)
    after = tensors_in(saved(policy, tmp_path / "merged", start=start))
    changed = {
        name
        for name, (_, tensor) in tensors_in(start).items()
        if not torch.equal(tensor, after[name][1])
    }
    assert changed
    assert all(name.startswith(TEXT[start.name]) for name in changed)
    assert all(("q_proj" in name or "v_proj" in name) for name in changed)


def test_skeleton_without_values_writes_the_same_names(tmp_path: Path) -> None:
    # `gather` makes a checkpoint whole without reading the weights of its source.
    start = save_composite("qwen2_5_vl", tmp_path / "start")
    policy = loaded(start)
    perturb(stored(policy), seed=9)
    copies = {f"model.{name}": each for name, each in policy.state_dict().items()}
    (tmp_path / "made").mkdir()
    export(
        tmp_path / "made",
        loaded(start, is_skeleton=True),
        AutoTokenizer.from_pretrained(start),
        copies,
    )
    assert torch.equal(logits(loaded(tmp_path / "made")), logits(policy))
    assert tensors_in(tmp_path / "made").keys() == tensors_in(start).keys()


def test_style_of_the_prompts_is_added_to_the_config(tmp_path: Path) -> None:
    start = save_composite("gemma3", tmp_path / "start")
    policy = loaded(start)
    policy.config.prompt_style = "verbose"
    written = saved(policy, tmp_path / "written", start=start)
    config = json.loads((start / "config.json").read_text(encoding="utf-8"))
    assert json.loads((written / "config.json").read_text(encoding="utf-8")) == {
        **config,
        "prompt_style": "verbose",
    }


def test_start_check_draws_no_token_of_an_image(tmp_path: Path) -> None:
    policy = make_bare(str(save_composite("gemma4", tmp_path / "start")))
    others = {policy.config.image_token_id, policy.config.audio_token_id}
    assert others <= set(range(320))
    probe = make_probe(
        policy, torch.device("cpu"), vocab_size=320, is_packed=False, dtype=torch.float32
    )
    assert not others & {int(each) for ids in probe.sequences for each in ids}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["NewForConditionalGeneration"]}, "no class NewForConditional"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "is a network for text"),
    ],
)
def test_class_that_transformers_lacks_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    start = save_composite("gemma3", tmp_path / "start")
    path = start / "config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(tree | changes), encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(start)
    with pytest.raises(ConfigError, match=words):
        composite_class(config, str(start))


def test_composite_that_computes_no_text_is_refused(tmp_path: Path) -> None:
    start = save_composite("blip-2", tmp_path / "start")
    with pytest.raises(ConfigError, match="computes no text without pixel_values"):
        make_bare(str(start))


def test_separate_critic_of_a_composite_is_refused(tmp_path: Path) -> None:
    start = save_composite("gemma3", tmp_path / "start")
    with pytest.raises(ConfigError, match=r"learner\.critic\.kind=model.*kind=head"):
        make_critic(CriticSection(kind=CriticKind.MODEL), loaded(start), policy_path=str(start))


def test_files_of_another_model_are_refused_as_source(tmp_path: Path) -> None:
    start = save_composite("gemma3", tmp_path / "start")
    policy = loaded(start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    for path in start.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(LongstrideError, match="Restore the files"):
        save_policy(tmp_path / "written", policy, tokenizer)
