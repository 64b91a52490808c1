"""TRL's GRPOTrainer on a dataset: the peer of `python run.py bench --suite peer-pretrained`.

    python docs/examples/trl_dataset.py SETTINGS.json

The start policy, the prompts in their order, the group size, the reward function, the optimizer's
settings and the learning rates are those of the configuration. TRL generates and trains in one
process, one after the other. It needs TRL beside this project's packages; the suite makes such an
environment.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer
from trl import GRPOTrainer

from common.config.learner import Precision
from common.config.load import load_config
from docs.examples.trl_quickstart import Clock, options_of, sync_weights
from envhub.catalogue.registry import Registry
from envhub.env import parse_item
from envhub.envs.dataset.env import load_task
from envhub.envs.dataset.graders import GRADERS
from learner.training.optimizer import lr_scale
from scheduler.curriculum.catalogue import parse_catalogue
from scheduler.curriculum.sampling import Sampler

MAX_ROWS = 16  # Completions of a forward and backward pass.


def prompts_of(cfg: Any, num: int) -> Iterator[dict[str, Any]]:
    """Yield the first prompts of the run, with their reference answers."""
    registry = Registry(["dataset"], cfg.envs, cfg.env)
    sampler = Sampler(cfg.tasks, parse_catalogue(registry.catalogue()), seed=cfg.run.seed)
    task = load_task(cfg.envs)
    for number in range(num):
        item = parse_item(sampler.item(number).item_id, task.subsets)
        question = task.datasets[item.subset].question(item.split, item.index)
        yield {"prompt": question.messages, "ground_truth": question.ground_truth}


def reward_of(name: str) -> Callable[..., list[float]]:
    """Return a grader of the configuration as a reward function of TRL."""
    grade = GRADERS[name]

    def reward(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        return [grade(text, wanted) for text, wanted in zip(texts, ground_truth, strict=True)]

    return reward


class Trainer(GRPOTrainer):
    """TRL's trainer with the learning rates of this project's learner."""

    def __init__(self, scale: Callable[[int], float], **arguments: Any) -> None:
        self._scale = scale
        super().__init__(**arguments)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self._scale)
        return self.lr_scheduler


def main(path: Path) -> None:
    """Train as the settings say: config, overrides, keep_every_steps, last_step, out."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    out = Path(settings["out"])
    cfg = load_config(settings["config"], settings["overrides"])
    size = cfg.groups.size * cfg.groups.per_step
    rows = math.gcd(size, MAX_ROWS)
    options = options_of(
        cfg,
        out,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=size // rows,
        max_completion_length=cfg.actor.max_turn_tokens,
        weight_decay=cfg.learner.weight_decay,
        adam_beta1=cfg.learner.beta1,
        adam_beta2=cfg.learner.beta2,
        max_grad_norm=cfg.learner.max_grad_norm,
        temperature=1.0,
        bf16=cfg.learner.precision is Precision.BF16,
        gradient_checkpointing=False,
        logging_steps=1,
    )
    num_groups = cfg.groups.per_step * cfg.train.num_steps
    trainer = Trainer(
        partial(lr_scale, num_steps=cfg.train.num_steps, cfg=cfg.learner),
        model=cfg.model.path,
        processing_class=AutoTokenizer.from_pretrained(cfg.model.path),
        reward_funcs=reward_of(cfg.envs.dataset.reward),
        args=options,
        train_dataset=Dataset.from_list(list(prompts_of(cfg, num_groups))),
        callbacks=[Clock(out, every=settings["keep_every_steps"], last=settings["last_step"])],
    )
    generation = trainer.vllm_generation
    generation.sync_weights = partial(sync_weights, generation)
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
