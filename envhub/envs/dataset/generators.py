"""Tasks that a library generates from seeds: `data.train=reasoning_gym:chain_sum,leg_counting`.

An item of a split is the first seed of its own range whose question belongs to the split, by the
hash of the question. So no question is in two splits, also if a task has few different questions.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from common.config.envs import DatasetOptions
from common.errors import ConfigError, EnvFailure
from common.functions.calls import GraderProcess, UserFunction, shipped_function, start_process
from common.text import known_hint
from envhub.env import SPLITS
from envhub.envs.dataset.files import Record
from envhub.envs.dataset.graders import LIBRARIES, generated_texts, verifier
from envhub.envs.dataset.prompts import PromptMaker
from envhub.envs.dataset.records import SUBSET, Dataset, DataSplit
from envhub.envs.dataset.rewards import GENERATED
from envhub.interop.yaml_environments import optional_package

LIBRARY = "reasoning_gym"
EXTRA = "reasoning-gym"
PREFIX = GENERATED
FIRST_SEEDS = {"train": 0, "validation": 1_000_000_000, "test": 2_000_000_000}
SEEDS = 128  # Seeds of an item. With probability 1e-12 none of them belongs to its split.
SHARES = 5  # Of so many equal shares of the questions, the first is test, the second validation.
DEFAULT_SIZES = {"train": 10_000, "validation": 200, "test": 200}
NUM_CACHED = 4096
GENERATE_S = 60.0  # Most seconds in which an entry is generated.
GENERATE = shipped_function("generator", generated_texts, library=LIBRARY)
VERIFIER = "verifier"
VERIFY = shipped_function(VERIFIER, verifier, library=LIBRARIES[VERIFIER])
NO_ANSWER = "I do not know."
FORM = "<answer>{}</answer>"
INSTRUCTION = f"Answer the question. Give only the final answer as {FORM.format('ANSWER')}."


def is_generated(options: DatasetOptions) -> bool:
    """Return whether a library generates the records."""
    return options.train.startswith(PREFIX)


def instruction_for(options: DatasetOptions) -> str:
    """Return the form of an answer; "" if the configuration words the prompt itself."""
    is_worded = options.system or options.template != DatasetOptions().template
    return INSTRUCTION if is_generated(options) and not is_worded else ""


def split_of_question(question: str) -> str:
    """Return the split to which a question belongs."""
    share = hashlib.sha256(question.encode()).digest()[0] % SHARES
    return {0: "test", 1: "validation"}.get(share, "train")


class EntryMaker:
    """Generates entries in a process of its own, which has the hash seed of the verifier's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Protects the process, which runs one call at a time.
        self._process: GraderProcess | None = None

    def texts(self, record: Record) -> Record:
        """Return the question and the answer of a record. Raises: EnvFailure: generation fails."""
        return self._call(GENERATE, {"record": record})

    def score(self, record: Record, completion: str) -> float:
        """Return the score of an answer to a record. Raises: EnvFailure: the verifier fails."""
        return self._call(VERIFY, {"record": record, "completion": completion})

    def _call(self, function: UserFunction, keywords: dict[str, Any]) -> Any:
        with self._lock:
            if self._process is None or self._process.failure:
                self._process = start_process([GENERATE, VERIFY])
            return self._process.call(function, keywords, timeout_s=GENERATE_S)


class GeneratedRecords(Sequence[Record]):
    """The records of a split, generated when they are read. They hold their seed."""

    def __init__(
        self, maker: EntryMaker, task: str, options: Mapping[str, Any], split: str, size: int
    ) -> None:
        self._maker = maker
        self._task = task
        self._options = dict(options)
        self._split = split
        self._size = size
        self._record = lru_cache(NUM_CACHED)(self._make)

    def __len__(self) -> int:
        return self._size

    def check_verifier(self) -> None:
        """Raise ConfigError if the verifier pays in full for an answer that is none."""
        record = self[0]
        try:
            score = self._maker.score(record, NO_ANSWER)
        except EnvFailure:  # An error is no full score. The episodes report it.
            return
        if score >= 1:
            raise ConfigError(
                f"data.train={PREFIX}{self._task}: its verifier pays 1 for {NO_ANSWER!r}; set"
                " another reward, such as reward=exact_text"
            )

    def __getitem__(self, index: Any) -> Any:
        """Return a record.

        Raises: ConfigError: the task has too few different questions, or the generation fails.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if not 0 <= index < self._size:
            raise IndexError(index)
        return self._record(index)

    def _make(self, index: int) -> Record:
        """Return the first record of the item's seeds that belongs to the split."""
        first = FIRST_SEEDS[self._split] + index * SEEDS
        for seed in range(first, first + SEEDS):
            record: Record = {"task": self._task, "options": self._options, "seed": seed}
            try:
                texts = self._maker.texts(record)
            except EnvFailure as error:
                where = f"data.train={PREFIX}{self._task}: data.options.{self._task}"
                raise ConfigError(f"{where}={self._options}: seed {seed}: {error}") from error
            if split_of_question(texts["question"]) == self._split:
                return {**texts, **record}
        raise ConfigError(
            f"data.train={PREFIX}{self._task}: it has too few different questions for"
            f" {self._split} items; widen data.options.{self._task}"
        )


def load_generated(options: DatasetOptions) -> dict[str, Dataset]:
    """Return the data of each task by its subset: `data`, or the tasks' names if there are several.

    Raises: ConfigError: the package, a task or an option does not exist, or a value is wrong.
    """
    library: Any = optional_package(LIBRARY, EXTRA)
    datasets: dict[str, Any] = library.factory.DATASETS
    tasks = options.train.removeprefix(PREFIX).split(",")
    if len({*tasks}) < len(tasks):
        raise ConfigError(f"data.train={options.train}: names a task twice; set tasks[].weight")
    for task in tasks:
        if task not in datasets or task == "composite":
            hint = known_hint(task, [name for name in datasets if name != "composite"])
            raise ConfigError(f"data.train={PREFIX}{task}: reasoning-gym has no such task{hint}")
    for task in options.options:
        if task not in tasks:
            raise ConfigError(
                f"data.options.{task}: data.train={options.train} has no such task"
                f"{known_hint(task, tasks)}"
            )
    _check_unread(options)
    names = [SUBSET] if len(tasks) == 1 else tasks
    loaded = zip(names, tasks, strict=True)
    maker = EntryMaker()
    return {name: _load(maker, task, options, datasets[task][1]) for name, task in loaded}


def _check_unread(options: DatasetOptions) -> None:
    """Raise ConfigError for settings of files, which generated records do not have."""
    default = DatasetOptions()
    splits = ("train_split", "validation_split", "eval_split")
    for name in (
        "eval",
        "validation",
        "max_length",
        "shuffle",
        "prompt",
        "answer",
        "tools",
        *splits,
    ):
        if (value := getattr(options, name)) != getattr(default, name):
            raise ConfigError(f"data.{name}={value}: has no effect with data.train={PREFIX}TASK")


def _load(maker: EntryMaker, task: str, options: DatasetOptions, config: Any) -> Dataset:
    """Return the splits of one task. Raises: ConfigError: an option is wrong."""
    chosen = options.options.get(task, {})
    key = f"data.options.{task}"
    if not isinstance(chosen, dict):
        raise ConfigError(f"{key}={chosen}: expects options, such as {key}.NAME=VALUE")
    names = [field.name for field in fields(config) if field.name not in ("seed", "size")]
    for name, value in chosen.items():
        if name in ("seed", "size"):
            law = "the split sets the seeds; set data.train_size, data.eval_size"
            raise ConfigError(f"{key}.{name}={value}: {law} or data.validation_size")
        if name not in names:
            raise ConfigError(f"{key}.{name}={value}: no such option{known_hint(name, names)}")
    sizes = {
        "train": options.train_size,
        "validation": options.validation_size,
        "test": options.eval_size,
    }
    if not options.train_size:
        raise ConfigError("data.train_size=0: no record is left for training")
    splits: dict[str, DataSplit] = {}
    for split in SPLITS:
        size = DEFAULT_SIZES[split] if sizes[split] < 0 else sizes[split]
        records = GeneratedRecords(maker, task, chosen, split, size)
        splits[split] = DataSplit(name=f"{task} ({split})", records=records, numbers=range(size))
    first = splits["train"].record(0)
    held_out = [splits[name].record(0) for name in SPLITS[1:] if splits[name].numbers]
    prompts = PromptMaker(options, first)
    for record in [first, *held_out]:
        prompts.make(record, f"the first record of {task}")
    made_by = [
        LIBRARY,
        version(EXTRA),
        task,
        chosen,
        FIRST_SEEDS,
        SEEDS,
        SHARES,
        options.train_size,
    ]
    digest = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()
    return Dataset(prompts=prompts, splits=splits, content={f"data.train {task}": digest})
