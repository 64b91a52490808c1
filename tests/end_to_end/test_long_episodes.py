"""Law of a run with many actors and very long episodes, which share one real engine."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from common.repository import ROOT
from learner.journal.journal import read_journal
from tests.actor.engine.test_openai_app import served
from tests.end_to_end.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

NUM_ACTORS = 16
NUM_TURNS = 90  # Each observation of `rooms` has 338 tokens or more.
TOKENS = 30_000  # Least tokens of an episode. The whole of it is the prompt of its last turn.
CONTEXT = 40_000
OVERRIDES = (
    "tasks=[{env: rooms, subset: March}]",
    f"actor.max_model_len={CONTEXT}",
    "actor.max_turn_tokens=8",
    "actor.episode_timeout_s=850",
    "actor.env_timeout_s=300",
    "envhub.session_idle_s=850",
    f"learner.max_tokens_per_microbatch={CONTEXT}",
    "groups.size=8",
    "groups.per_step=2",
)


def make_policy(folder: Path) -> Path:
    """Write a policy of one small layer with random weights and a context of 40,000 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny")
    config = Qwen3Config(
        vocab_size=448,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=3,
    )
    tokenizer.save_pretrained(folder)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_sixteen_actors_deliver_episodes_of_30000_tokens(tmp_path: Path) -> None:
    model = f"model.path={make_policy(tmp_path / 'policy')}"
    engine = ("model.dtype=float32", "actor.kv_cache_gib=1", f"actor.max_concurrent={NUM_ACTORS}")
    with served(tmp_path, model, *engine) as (url, _):
        fleet = Fleet(tmp_path, model, *OVERRIDES, horizon=NUM_TURNS)
        try:
            fleet.start_centre()
            for number in range(NUM_ACTORS):
                fleet.add(number, 1, url=url)
            fleet.wait_until(lambda: len(fleet.finished()) == NUM_ACTORS, timeout_s=800)
            fleet.wait_until(lambda: fleet.ledger()["version"] >= 1, timeout_s=800)
            fleet.check_books()
            episodes = [t for _, t in read_journal(fleet.learner_dir.journal)]
        finally:
            fleet.close()
    assert min(len(t.token_ids) for t in episodes) >= TOKENS
    assert {t.num_turns for t in episodes} == {NUM_TURNS}
    assert {len(t.segment_starts) for t in episodes} == {0}
    # A policy with random weights: nearly log(1/448), and unlike for each token.
    logprobs = [t.logprobs[t.loss_mask] for t in episodes]
    assert all(each.min() > -8.0 and each.max() < -4.0 and each.std() > 0 for each in logprobs)
