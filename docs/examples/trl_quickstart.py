"""TRL's GRPOTrainer on the quickstart's tasks: the peer of `python run.py bench --suite peer`.

    python docs/examples/trl_quickstart.py SETTINGS.json

The same start policy, training items in the same order, horizons, group size, clip and aggregation;
vLLM in TRL's own process, rollouts and environments in that process, too. It needs TRL beside this
project's packages; the suite makes such an environment. It optimises with AdamW, in bf16.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vllm import SamplingParams

from actor.rollout.episode import Turn
from benchmarks.actor.in_process import InProcessPlayer
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.ids import episode_id_of
from common.wire.messages import EpisodeKind, Lease, PolicyKind
from envhub.catalogue.registry import Registry
from learner.algorithms.rewards import shaped_reward
from scheduler.curriculum.catalogue import parse_catalogue
from scheduler.curriculum.curriculum import horizon_at
from scheduler.curriculum.sampling import Item, Sampler, member_seed

EPISODE_S = 3600.0  # A deadline that no episode here reaches.


class TrainersEngine:
    """The engine inside a trainer, with the interface that episodes use."""

    def __init__(self, end_ids: Sequence[int]) -> None:
        self.llm: Any = None
        self.version = 0
        self._end_ids = list(end_ids)

    async def generate_together(
        self, prompts: Mapping[str, list[int]], *, max_tokens: int, **_: Any
    ) -> dict[str, Turn]:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=1.0, logprobs=0, stop_token_ids=self._end_ids
        )
        asked = [{"prompt_token_ids": ids} for ids in prompts.values()]
        answered = self.llm.generate(asked, sampling, use_tqdm=False)
        return {
            name: self._turn(each.outputs[0]) for name, each in zip(prompts, answered, strict=True)
        }

    def _turn(self, output: Any) -> Turn:
        ids = list(output.token_ids)
        scores = [known[token].logprob for token, known in zip(ids, output.logprobs, strict=True)]
        is_stopped = ids[-1] in self._end_ids
        return Turn(ids, scores, [self.version] * len(ids), is_stopped=is_stopped)


def lease_of(
    item: Item, group_id: str, member: int, seed: int, horizon: int, version: int
) -> Lease:
    """Return the lease of a group's member, as a scheduler would grant it."""
    return Lease(
        episode_id=episode_id_of(group_id, member),
        group_id=group_id,
        member=member,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        policy=PolicyKind.MODEL,
        env=item.env,
        item_id=item.item_id,
        seed=seed,
        horizon=horizon,
        horizon_stage=0,
        opened_at_version=version,
        deadline_s=EPISODE_S,
    )


class Rollouts:
    """Plays the groups of a step, as a `rollout_func` of TRL."""

    def __init__(self, cfg: Any) -> None:
        registry = Registry(sorted({task.env for task in cfg.tasks}), cfg.envs, cfg.env)
        tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
        self._cfg = cfg
        self._catalogue = parse_catalogue(registry.catalogue())
        self._sampler = Sampler(cfg.tasks, self._catalogue, seed=cfg.run.seed)
        self._engine = TrainersEngine([tokenizer.eos_token_id])
        specs = {name: registry.spec(name) for name in registry.names}
        self._player = InProcessPlayer(cfg, specs, self._engine)

    def horizon(self, step: int) -> int:
        return horizon_at(self._cfg.horizon.policy(""), step).horizon

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        self._engine.llm = trainer.vllm_generation.llm
        step, seen = trainer.state.global_step, dict[str, int]()
        leases: list[Lease] = []
        for prompt in prompts:
            member = seen[prompt] = seen.get(prompt, -1) + 1
            number = int(prompt)
            item = self._sampler.item(number)
            most = self._catalogue.entry(item.env, item.subset).max_turns
            seed = member_seed(self._cfg.run.seed, number, member)
            horizon = min(self.horizon(step), most)
            leases.append(lease_of(item, f"g{number:07d}", member, seed, horizon, step))
        batch: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "paid")
        }
        penalty = self._cfg.algorithm.invalid_action_penalty
        for trajectory in self._player.play(leases):
            start = int(trajectory.loss_mask.argmax())
            batch["prompt_ids"].append(trajectory.token_ids[:start].tolist())
            batch["completion_ids"].append(trajectory.token_ids[start:].tolist())
            batch["logprobs"].append(trajectory.logprobs[start:].tolist())
            batch["env_mask"].append(trajectory.loss_mask[start:].astype(int).tolist())
            num_turns, num_invalid = trajectory.num_turns, trajectory.num_invalid_actions
            batch["paid"].append(shaped_reward(trajectory.reward, num_invalid, num_turns, penalty))
        return batch


class Clock(TrainerCallback):
    """Writes a line for every step, and saves policies. Its own time is not training time."""

    def __init__(self, out: Path, *, every: int, last: int) -> None:
        self._out = out
        self._every = every
        self._last = last
        self._apart = (0.0, 0.0)
        self._start = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        now, step = self._now(), state.global_step
        wall_s, cpu_s = (now[i] - self._start[i] - self._apart[i] for i in range(2))
        line = {"step": step, "wall_s": wall_s, "cpu_s": cpu_s}
        with (self._out / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        control.should_training_stop = step >= self._last
        if step % self._every == 0 or step == self._last:
            folder = self._out / f"policy-{step}"
            context["processing_class"].save_pretrained(folder)
            context["model"].save_pretrained(folder)
        after = self._now()
        self._apart = tuple(self._apart[i] + after[i] - now[i] for i in range(2))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start = self._now()


def sync_weights(generation: Any) -> None:
    """Hand the policy to the engine by vLLM's own reload.

    On a CPU vLLM packs its layers' weights and drops the originals, into which TRL would load.
    """
    named = [(name, each.detach().clone()) for name, each in generation._iter_named_params()]
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named)})
    generation.llm.reset_prefix_cache()


def reward(paid: list[float], **_: Any) -> list[float]:
    return paid


def options_of(cfg: RunConfig, out: Path, **others: Any) -> GRPOConfig:
    """Return TRL's options with the values of a configuration, and the options of one task."""
    return GRPOConfig(
        output_dir=str(out / "trl"),
        generation_batch_size=cfg.groups.size * cfg.groups.per_step,
        num_generations=cfg.groups.size,
        max_steps=cfg.train.num_steps,
        learning_rate=cfg.learner.lr,
        epsilon=cfg.algorithm.clip_low,
        epsilon_high=cfg.algorithm.clip_high,
        beta=0.0,
        scale_rewards="none",
        loss_type="grpo",  # All episodes have the same weight, as with aggregation=sequence.
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=cfg.actor.max_model_len,
        vllm_gpu_memory_utilization=0.3,
        use_cpu=True,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=cfg.run.seed,
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
        **others,
    )


def main(path: Path) -> None:
    """Train as the settings say: config, overrides, keep_every_steps, last_step, out."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    out = Path(settings["out"])
    cfg = load_config(settings["config"], settings["overrides"])
    rollouts = Rollouts(cfg)
    num_groups = cfg.groups.per_step * cfg.train.num_steps
    size = cfg.groups.size * cfg.groups.per_step
    options = options_of(
        cfg,
        out,
        per_device_train_batch_size=size,
        max_completion_length=cfg.actor.max_model_len,
        lr_scheduler_type="linear",
        bf16=True,
        logging_steps=10,
    )
    trainer = GRPOTrainer(
        model=cfg.model.path,
        processing_class=AutoTokenizer.from_pretrained(cfg.model.path),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(num_groups)]),
        rollout_func=rollouts,
        callbacks=[Clock(out, every=settings["keep_every_steps"], last=settings["last_step"])],
    )
    generation = trainer.vllm_generation
    generation.sync_weights = partial(sync_weights, generation)
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
