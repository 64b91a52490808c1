"""The learner's scores of a small network in every form, beside the network's own forward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.conformance.networks import VOCAB, perturb, save_as_learner, stored, trained
from benchmarks.conformance.part_results import (
    NETWORK_ERRORS,
    PartResult,
    Verdict,
    compared,
    refused,
)
from benchmarks.conformance.sharded import RankPair
from common.config.learner import (
    Activations,
    CriticSection,
    Layout,
    LearnerSection,
    LoraSection,
    Precision,
)
from common.errors import ConfigError
from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.activation_plan import StoredLayers
from learner.policy.activations import use_activations
from learner.policy.composite import composite_class, source_of
from learner.policy.forward import Networks, Passes
from learner.policy.kernels.head import trunk_of
from learner.policy.lora import check_targets
from learner.policy.merging import merged_tensors
from learner.policy.model import Scoring, load_policy, make_critic, token_logprobs
from learner.policy.model_shape import INDEX, LANGUAGE

# Tokens of the scored sequences: shorter and longer than windows and chunks of small networks.
LENGTHS = (20, 72, 41, 53)
SHARED = (0, 0, 20, 24)  # First tokens that each sequence shares with the one before.
SECOND = "second"  # Folder of the checkpoint with the second weights.
FIRST_WORD = 3  # The ids below are special tokens.
LAST_WORD = VOCAB - 16  # The ids from here on stand for images or sound in composites.
EXACT = Scoring(chunk_tokens=64, dtype=torch.float32)
MAX_GRADIENT_GAP = 1e-3  # Relative difference of two gradients.

Scores = list[list[float]]


def make_sequences() -> list[list[int]]:
    """Return fixed random sequences; adjacent ones begin alike."""
    draw = np.random.default_rng(7)
    sequences = [draw.integers(FIRST_WORD, LAST_WORD, length).tolist() for length in LENGTHS]
    for index, num in enumerate(SHARED):
        sequences[index][:num] = sequences[index - 1][:num]
    return sequences


SEQUENCES = make_sequences()


class LearnerSide:
    """Examines one family part by part. After `examine` the policy has the second weights."""

    def __init__(self, start: Path, folder: Path, *, pair: RankPair) -> None:
        """Load the network that transformers wrote to `start`.

        Args:
            folder: receives the learner's checkpoints.
            pair: scores sharded weights.
        """
        self._start = str(start)
        self._folder = folder
        self._pair = pair
        self.findings: dict[str, PartResult] = {}
        self.plain = load_plain(self._start)
        self.first = plain_scores(self.plain)
        self.second: Scores = []  # Scores of the second weights.
        self.policy: PreTrainedModel | None = None

    def examine(self, parts: Sequence[str] = ()) -> None:
        """Find the verdict of every part that needs no engine, or of `full` and `parts` only."""
        with self._part("full"):
            self.policy = load_policy(self._start, device="cpu")
            self._note("full", self._full(self.policy))
        if self.policy is None or self.findings["full"].verdict is Verdict.REFUSED:
            return
        policy = self.policy
        for name, examine in (
            ("sft", self._sft),
            ("critic", partial(self._critic, policy)),
            ("packed", partial(self._packed, policy)),
            ("shared prefix", partial(self._shared_prefix, policy)),
            ("lora", self._lora),
            ("sharded", self._sharded),
            ("checkpoint", partial(self._checkpoint, policy)),
            ("published layout", self._published_layout),
        ):
            is_left_out = parts and name not in parts
            if is_left_out or (name == "published layout" and source_of(policy) is None):
                continue
            with self._part(name):
                self._note(name, examine())

    def _note(self, name: str, found: float | PartResult) -> None:
        """Record the result of one part."""
        self.findings[name] = found if isinstance(found, PartResult) else compared(found)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Turn an error into a finding: the project refuses with a ConfigError only."""
        try:
            yield
        except ConfigError as error:
            self.findings[name] = refused(error)
        except NETWORK_ERRORS as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            self.findings[name] = PartResult(verdict=Verdict.WRONG, message=message)

    def _full(self, policy: PreTrainedModel) -> float:
        """Return the difference of padded sequences, with all weights trained."""
        return gap_of(self._scored(policy, Layout.PADDED), self.first)

    def _scored(self, policy: PreTrainedModel, layout: Layout, **networks: Any) -> Scores:
        """Return the learner's scores of the test sequences."""
        passes = passes_of(policy, layout, **networks)
        passes.check_start(may_pad=False)
        return passes.score_sequences(SEQUENCES)

    def _sft(self) -> PartResult:
        """Compare the gradient, with layers computed again, to that of the plain forward pass."""
        policy = load_policy(self._start, device="cpu")
        use_activations(policy, Activations.RECOMPUTE, StoredLayers(0, False), 0)
        block = block_of(SEQUENCES)
        token_logprobs(policy, block, EXACT).mean().backward()
        ours = gradient_of(policy, dict(policy.named_parameters()))
        plain = load_plain(self._start)
        torch.cat([_scored_alone(plain, each) for each in SEQUENCES]).mean().backward()
        theirs = gradient_of(plain, dict(policy.named_parameters()))
        if not float(theirs.norm()):
            return PartResult(verdict=Verdict.WRONG, message="the plain network has no gradient")
        gap = float((ours - theirs).norm() / theirs.norm())
        return compared(gap, tolerance=MAX_GRADIENT_GAP, message="relative gap of gradients")

    @torch.no_grad()
    def _critic(self, policy: PreTrainedModel) -> float:
        """Return the difference of a policy with a critic."""
        critic = make_critic(CriticSection(), policy, policy_path=self._start)
        perturb(stored(critic.head), seed=3)
        passes = passes_of(policy, Layout.PADDED, critic=critic)
        passes.check_start(may_pad=False)
        values = passes.score(block_of(SEQUENCES), with_values=True).values
        assert values is not None
        expected = [
            critic.of_hidden(
                trunk_of(self.plain)(
                    input_ids=torch.tensor([each]), use_cache=False
                ).last_hidden_state[0, :-1]
            )
            for each in SEQUENCES
        ]
        return float((values - torch.cat(expected)).abs().max())

    def _packed(self, policy: PreTrainedModel) -> float:
        """Return the difference of packed sequences."""
        return gap_of(self._scored(policy, Layout.PACKED), self.first)

    @torch.no_grad()
    def _shared_prefix(self, policy: PreTrainedModel) -> float:
        """Return the difference of sequences with a shared prefix."""
        passes = passes_of(policy, Layout.PACKED)
        passes.check_start(may_pad=False)
        block = block_of(SEQUENCES, is_packed=True, shared=SHARED)
        expected = [score for scores in self.first for score in scores]
        return _largest(passes.score(block).logprobs.tolist(), expected)

    def _lora(self) -> PartResult:
        """Return the difference of a policy with adapters."""
        bare = load_policy(self._start, device="cpu")
        cfg, message = lora_for(bare)
        policy = load_policy(self._start, device="cpu", lora=cfg)
        perturb(trained(policy), seed=4)
        merged = dict(merged_tensors(policy, policy.state_dict()))
        plain = load_plain(self._start)
        plain.load_state_dict(plain.state_dict() | merged)
        gap = gap_of(self._scored(policy, Layout.PADDED), plain_scores(plain))
        return compared(gap, message=message)

    def _sharded(self) -> float:
        """Return the difference of a policy that two ranks share."""
        return gap_of(self._pair.score(self._start, SEQUENCES), self.first)

    def _checkpoint(self, policy: PreTrainedModel) -> float:
        """Write both weights as the learner does, and read the second with both libraries."""
        save_as_learner(policy, self._folder / "first", start=self._start)
        perturb(stored(policy), seed=1)
        self.plain.load_state_dict(self.plain.state_dict() | policy.state_dict())
        self.second = plain_scores(self.plain)
        saved = str(save_as_learner(policy, self._folder / SECOND, start=self._start))
        again = load_policy(saved, device="cpu")
        gaps = [
            gap_of(plain_scores(load_plain(saved)), self.second),
            gap_of(self._scored(again, Layout.PADDED), self.second),
        ]
        return float(np.max(gaps))  # Python's own `max` leaves out a NaN behind a number.

    def _published_layout(self) -> PartResult:
        """Compare the files of a composite's checkpoint, file by file, with those it came from."""
        problem = layout_problem(Path(self._start), self._folder / SECOND)
        verdict = Verdict.WRONG if problem else Verdict.RIGHT
        return PartResult(verdict=verdict, message=problem)


def layout_problem(start: Path, written: Path) -> str:
    """Return what a composite's checkpoint lost of the files that it came from, "" for nothing.

    Weights of the language model may differ. All other weights and files must be equal.
    """
    names = {path.name for path in start.iterdir()}
    if names != {path.name for path in written.iterdir()}:
        return f"its files are not those of the source: {sorted(names)}"
    for name in sorted(names - {INDEX}):
        ours = written / name
        theirs = start / name
        if not name.endswith(".safetensors"):
            if ours.read_bytes() != theirs.read_bytes():
                return f"{name} has other content"
            continue
        with safe_open(ours, "pt") as new, safe_open(theirs, "pt") as old:
            if new.keys() != old.keys():
                return f"{name} has other tensors"
            for tensor in filterfalse(LANGUAGE.match, old.keys()):
                if not torch.equal(new.get_tensor(tensor), old.get_tensor(tensor)):
                    return f"{tensor} has other numbers"
    kind: Any = composite_class(AutoConfig.from_pretrained(written), str(written))
    assert kind is not None
    _, report = kind.from_pretrained(written, output_loading_info=True, local_files_only=True)
    lost = [*report["missing_keys"], *report["unexpected_keys"]]
    return f"transformers does not find {lost[0]}" if lost else ""


def load_plain(path: str) -> PreTrainedModel:
    """Return a network as transformers alone loads it; of a composite, the whole."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    kind: Any = composite_class(config, path) or AutoModelForCausalLM
    model = kind.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


@torch.no_grad()
def plain_scores(model: PreTrainedModel) -> Scores:
    """Return the log-probability of each token after the first by the forward pass itself."""
    return [_scored_alone(model, each).tolist() for each in SEQUENCES]


def _scored_alone(model: Callable[..., Any], sequence: list[int]) -> Tensor:
    """Return the network's own scores of one sequence."""
    ids = torch.tensor([sequence])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def passes_of(policy: PreTrainedModel, layout: Layout, **networks: Any) -> Passes:
    """Return a learner's passes in fp32."""
    cfg = LearnerSection(device="cpu", precision=Precision.FP32, layout=layout)
    made = Networks(policy=policy, **networks)
    return Passes(cfg, made, temperature=1.0, engine_dtype="float32")


def block_of(sequences: Sequence[list[int]], **how: Any) -> TokenBatch:
    """Return all sequences as one block in which every token after the first is scored."""
    arrays = [np.asarray(each) for each in sequences]
    masks = [np.arange(len(each)) > 0 for each in sequences]
    return collate_tokens(arrays, masks, device="cpu", **how)


def gradient_of(model: nn.Module, names: Iterable[str]) -> Tensor:
    """Return the gradient of weights by name as one vector, zero where a weight has none."""
    weights = [model.get_parameter(name) for name in names]
    return torch.cat(
        [
            torch.zeros(each.numel()) if each.grad is None else each.grad.flatten()
            for each in weights
        ]
    )


def lora_for(model: PreTrainedModel) -> tuple[LoraSection, str]:
    """Return adapters on the default targets that a network has, else on all its linear layers."""
    default = LoraSection(rank=4, alpha=8.0)
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    own = sorted(linear.intersection(default.targets)) or sorted(linear) or default.targets
    cfg = LoraSection(rank=4, alpha=8.0, targets=own)
    check_targets(model, cfg)
    is_default = set(own) == set(default.targets)
    return cfg, "" if is_default else f"learner.lora.targets={','.join(own)}"


def gap_of(found: Scores, expected: Scores) -> float:
    """Return the largest difference of the scores of all sequences; NaN if one is NaN."""
    pairs = zip(found, expected, strict=True)
    return float(np.max([_largest(ours, theirs) for ours, theirs in pairs]))


def mean_gap_of(found: Scores, expected: Scores) -> float:
    """Return the mean difference of the scores of all sequences; NaN if one is NaN."""
    gaps = [np.abs(np.subtract(*each)) for each in zip(found, expected, strict=True)]
    return float(np.concatenate(gaps).mean())


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference of two lists of scores."""
    gaps = np.abs(np.asarray(found) - np.asarray(expected))
    return float(gaps.max())
