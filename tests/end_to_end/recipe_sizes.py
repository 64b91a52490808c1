"""Small sizes and small policies for the commands of docs/RECIPES.md, without a GPU."""

from pathlib import Path

from learner.policy.saving import save_tokenizer
from tests.docs.recipes import Recipe
from tests.learner.experts import VOCAB, save_experts
from tools.checks.served_engines import merged_overrides
from tools.offline.scratch import make_tokenizer

CONTEXT = 2040  # Tokens; the small policies have 2,048 positions.
CONTEXT_OF_EXPERTS = 500  # Tokens; the random experts have 512 positions.
FEW = (
    "train.num_steps=1",
    "groups.size=4",
    "groups.min_size=2",
    "groups.per_step=2",
    "learner.num_minibatches=1",
    "actor.max_concurrent=8",
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "log.wandb=disabled",
    "log.live=false",
)
# Replace the GPUs of a preset, and sizes that are too large for a small policy.
SMALL = (
    "model.dtype=float32",
    "machine.num_gpus=0",
    "machine.num_nodes=1",
    "learner.device=cpu",
    "learner.num_gpus=0",
    "learner.num_ranks=1",
    "learner.precision=fp32",
    "learner.max_tokens_per_microbatch=4096",
    "actor.num_gpus=0",
    "actor.num_actors=1",
    "actor.tensor_parallel_size=1",
    "actor.placement=auto",
    "actor.kv_cache_gib=1",
    "actor.max_turn_tokens=16",
    f"actor.max_model_len={CONTEXT}",
    "envhub.style=compact",  # The small policies have read only this style.
    "horizon.kind=fixed",
    "horizon.stages=[10]",
)
# A small policy cannot solve these tasks, so all rewards of a group are equal. The entropy bonus
# gives the optimizer step a gradient.
WITHOUT_SIGNAL = ("algorithm.filter_zero_variance=false", "algorithm.entropy_coef=0.01")
UNSOLVED = (
    "grade.py:is_right",
    "--config terminal",
    "examples/mini-swe-agent",
    "docs/examples/sort.py",
    "gymnasium:",
    "mcp:",
    "qwen3-30b-a3b",
    "--config smollm2-chain-sum",
    "--config smollm2-textworld",
)
# Part of a command -> the policy that has seen such tasks, and the limit of its turns.
POLICIES = {
    "examples/dataset/questions.jsonl": ("tiny", 16),
    "--config dataset-": ("tiny-arithmetic", 16),
    "--config smollm2-chain-sum": ("tiny-arithmetic", 16),
    "--config smollm2-textworld": ("tiny-textcraft", 16),
    "--config babyai-": ("tiny-expert", 16),
    "--config textcraft-": ("tiny-textcraft", 48),
    "env.dialect=": ("tiny-textcraft", 48),
}


def may_lack_signal(recipe: Recipe) -> bool:
    """Return whether all rewards of a command's groups may be equal with a small policy."""
    return any(part in recipe.command for part in UNSOLVED)


def small_overrides(recipe: Recipe, folder: Path, *more: str) -> list[str]:
    """Return the overrides of a recipe's command with small sizes.

    Args:
        folder: receives a policy that the project does not ship.
        more: later overrides, which replace the others.
    """
    sizes = SMALL if recipe.configuration.machine.num_gpus else ()
    own = WITHOUT_SIGNAL if may_lack_signal(recipe) else ()
    given = [*recipe.request.overrides, *sizes, *_policy(recipe, folder), *FEW, *own, *more]
    return merged_overrides(given)


def _policy(recipe: Recipe, folder: Path) -> list[str]:
    """Return the overrides that replace the model of a command; [] keeps it."""
    if "qwen3-30b-a3b" in recipe.command:
        experts = folder / "experts"
        save_experts(experts, "qwen3_moe")
        save_tokenizer(experts, make_tokenizer(["go to the red ball"], vocab_size=VOCAB))
        return [f"model.path={experts}", f"actor.max_model_len={CONTEXT_OF_EXPERTS}"]
    for part, (name, max_turn_tokens) in POLICIES.items():
        if part in recipe.command:
            path = f"model.path=configs/policies/{name}"
            return [path, f"actor.max_turn_tokens={max_turn_tokens}"]
    return []
