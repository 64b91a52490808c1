"""Policies are trained behind the harnesses by name: real runs with real agents of others.

The harnesses are installed at the first run, as in `tests/actor/agents/test_harnesses.py`. The
policy is a small random network with a tokenizer of the documentation, so it solves no task. A
reward over the group gives its answers different rewards, and each step changes the weights.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from actor.agents.harnesses import HARNESSES
from actor.engine.engine import digest_of
from common import repository
from common.wire.messages import EndReason, Trajectory
from learner.journal.journal import read_journal
from tests.actor.agents.test_harnesses import ROOT, install_or_skip
from tests.actor.agents.test_tool_calls import TOOLS_TEMPLATE
from tests.end_to_end.runs import Run
from tests.pretrained import make_smollm2

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
MAX_TOKENS = 40_000  # The first prompts of codex and opencode have above 10,000 tokens.
NUM_STEPS = 3  # The random policy plays one task in each step.
GROUP_SIZE = 2
NOISE = "offpolicy/noise_abs_logprob"
MAX_NOISE = 1e-3  # Nats between the learner and the engine at the same version.
RUN_S = 1500.0
MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
SAMPLED = re.compile(r"sampled request=(\S+):\d+:\d+ num=(\d+) crc=([0-9a-f]{8})")
OWN = """
import itertools
numbers = itertools.count()

def in_turn(draw, cfg):
    "All tasks, one after another."
    return draw.tasks[0].name, next(numbers) % draw.tasks[0].num_items

def rank(completion_ids):
    "The mean token id of the answers of an episode, by the size of the vocabulary."
    return [sum(ids) / len(ids) / 4096 for ids in completion_ids]
"""


def make_policy(folder: Path) -> Path:
    """Write a random policy with a long context, whose chat template has tools."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=[*MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [path.read_text(encoding="utf-8") for path in repository.ROOT.glob("docs/*.md")]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*MARKS],
        clean_up_tokenization_spaces=False,
    )
    calls = ("<tool_call>", "</tool_call>")
    fast.add_tokens([AddedToken(mark, special=False) for mark in calls])
    fast.chat_template = TOOLS_TEMPLATE
    torch.manual_seed(0)
    words = fast.get_vocab()
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=None,
        eos_token_id=words["<|im_end|>"],
        pad_token_id=words["<|endoftext|>"],
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


def answers_of(episode: Trajectory) -> Counter[tuple[int, str]]:
    """Return the sampled answers of an episode, by their length and checksum."""
    is_start = np.zeros(episode.loss_mask.size, bool)
    is_start[episode.segment_starts] = True  # An answer to a shared prompt begins a row.
    answers: Counter[tuple[int, str]] = Counter()
    parts = np.cumsum(np.diff(episode.loss_mask, prepend=False) | is_start)
    for part in np.unique(parts[episode.loss_mask]):
        places = np.flatnonzero(parts == part)
        digest = digest_of(episode.token_ids[places].tolist(), episode.logprobs[places].tolist())
        answers[places.size, f"{digest:08x}"] += 1
    return answers


def sampled_by_engine(root: Path) -> dict[str, Counter[tuple[int, str]]]:
    """Return episode -> what the engine sampled for it, by the log of the actor."""
    sampled: dict[str, Counter[tuple[int, str]]] = {}
    for path in (root / "logs").glob("actor*.log"):
        for episode, num, digest in SAMPLED.findall(path.read_text(encoding="utf-8")):
            if int(num):
                sampled.setdefault(episode, Counter())[int(num), digest] += 1
    return sampled


@pytest.mark.parametrize("name", HARNESSES)
def test_random_policy_is_trained_behind_each_harness(
    name: str, policy: Path, tmp_path: Path
) -> None:
    install_or_skip(name)
    own = tmp_path / "own.py"
    own.write_text(OWN, encoding="utf-8")
    settings = (
        f"model.path={policy}",
        f"actor.agent=[{name}]",
        f"actor.harnesses={ROOT}",
        f"actor.max_model_len={MAX_TOKENS}",
        "actor.max_turn_tokens=32",
        "actor.max_concurrent=2",
        f"learner.max_tokens_per_microbatch={MAX_TOKENS}",
        "envs.sandbox.memory_mib=4096",
        "envs.sandbox.processes=512",
        f"train.num_steps={NUM_STEPS}",
        f"groups.size={GROUP_SIZE}",
        "groups.per_step=1",
        f"curriculum.kind={own}:in_turn",
        f"groups.reward={own}:rank",
        "log.level=DEBUG",
        f"run.stall_s={RUN_S}",  # Long rows on a busy machine.
    )
    episodes = check_training(tmp_path, settings, config="harness", group_size=GROUP_SIZE)
    assert len({each.item_id for each in episodes}) >= NUM_STEPS


def test_pretrained_model_is_trained_behind_aider(tmp_path: Path) -> None:
    install_or_skip("aider")
    settings = (
        f"model.path={make_smollm2(tmp_path)}",
        f"actor.harnesses={ROOT}",
        f"train.num_steps={NUM_STEPS}",
        "log.level=DEBUG",
        f"run.stall_s={RUN_S}",
    )
    config = "docs/examples/first-files/train.yaml"
    check_training(tmp_path, settings, config=config, group_size=4)


def check_training(
    folder: Path, settings: Sequence[str], *, config: str, group_size: int
) -> list[Trajectory]:
    """Return the episodes of a run whose steps train each sampled token of a group once."""
    with Run(folder, *settings, config=config) as run:
        assert run.wait(timeout_s=RUN_S) == 0, run.output[-3_000:]
        lines = run.metrics()
        ledger = run.read("ledger.json")
        episodes = {each.episode_id: each for _, each in read_journal(run.root / "journal")}
        sampled = sampled_by_engine(run.root)
        text = (run.root / "checksums.jsonl").read_text(encoding="utf-8")
        log = run.output
    steps = [json.loads(line) for line in text.splitlines()]
    checksums = [step for step in steps if "digests" in step]
    assert (ledger["failed"], ledger["lost"]) == (0, 0), log[-3_000:]
    assert ledger["trained"] == NUM_STEPS * group_size
    for episode_id, episode in episodes.items():
        assert episode.end_reason is EndReason.DONE, episode.error
        assert answers_of(episode) == sampled[episode_id]
    assert [line["step"] for line in lines] == [*range(1, NUM_STEPS + 1)]
    for line in lines:
        assert line["train/num_updates"] == 1.0
        assert line["train/grad_norm"] > 0.0
    # A step without tokens of its own version has no noise.
    noise = [line[NOISE] for line in lines if line["offpolicy/num_same_version_tokens"]]
    assert 0.0 < max(noise) < MAX_NOISE
    assert len({step["digests"]["weights"] for step in checksums}) == NUM_STEPS
    return [*episodes.values()]
