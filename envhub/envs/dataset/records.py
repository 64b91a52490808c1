"""The items of a dataset: its records after split, filter and shuffle, with their digests."""

import hashlib
import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

from common.config.envs import DatasetOptions
from common.errors import ConfigError
from common.formats.turns import FirstPrompt
from common.text import counted
from common.user_code import find_path
from envhub.env import REVISION
from envhub.envs.dataset.files import (
    Record,
    commit_of,
    digest_of,
    files_of,
    find_data,
    has_split,
    own_split,
    read_records,
)
from envhub.envs.dataset.prompts import PromptMaker, Question, answer_text

logger = logging.getLogger(__name__)

SUBSET = "data"
NUM_MEASURED = 50  # Generated prompts of a split that are measured before the start.
HELD_OUT_FRAC = 0.1
MAX_HELD_OUT = 200  # Records that are held out by default.
# Settings that determine which record an item is.
LATER_SETTINGS = ("validation_size", "train_size", "validation_split")
ITEM_SETTINGS = ("eval_size", "max_length", "shuffle", "train_split", "eval_split")
NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplit:
    """The records of one split, in the order of the items."""

    name: str  # The file, for messages.
    records: Sequence[Record]
    numbers: Sequence[int]  # For each item the index of its record in the file.

    def record(self, index: int) -> Record:
        """Return the record of an item."""
        return self.records[self.numbers[index]]

    def place(self, index: int) -> str:
        """Return the record of an item as text, counted from 1."""
        return f"record {self.numbers[index] + 1} of {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The records of the splits with the maker of their prompts."""

    prompts: PromptMaker
    splits: dict[str, DataSplit]  # "train", "test" and "validation".
    content: dict[str, str]  # Digests of the files and of the settings, by key.

    def question(self, split: str, index: int) -> Question:
        """Return the question of an item. Raises: ConfigError: a template fails on its record."""
        data_split = self.splits[split]
        return self.prompts.make(data_split.record(index), data_split.place(index))

    def reference(self, split: str, index: int) -> str:
        """Return what `ground_truth` of an item is as text; "" without a reference answer.

        Raises: ConfigError: the record's prompt is wrong.
        """
        data_split = self.splits[split]
        record = data_split.record(index)
        if "ground_truth" in record and "ground_truth" not in self.prompts.replaced:
            answer = answer_text(record["ground_truth"])
        else:
            answer = self.prompts.answer(record, data_split.place(index))
        return answer or ""

    def first_prompts(self) -> Iterator[tuple[FirstPrompt, Record]]:
        """Yield the prompt and the record of every item, and of the first generated ones.

        Raises: ConfigError: a template fails.
        """
        for name, split in self.splits.items():
            is_listed = isinstance(split.records, list)
            for index in range(len(split.numbers))[: None if is_listed else NUM_MEASURED]:
                messages = [{**each} for each in self.question(name, index).messages]
                prompt = FirstPrompt(env="dataset", place=split.place(index), messages=messages)
                yield prompt, split.record(index)

    def samples(self) -> list[str]:
        """Return a few reference answers, different from each other."""
        train = self.splits["train"]
        num = 64 if isinstance(train.records, list) else NUM_SAMPLES  # Generation takes time.
        answers = (self.question("train", i).answer for i in range(min(num, len(train.numbers))))
        return list(dict.fromkeys(filter(None, answers)))[:NUM_SAMPLES]


def load_dataset(options: DatasetOptions) -> Dataset:
    """Return the records of the configuration; equal files are read once by a process.

    Raises: ConfigError: a file, a column, a record or a template is wrong.
    """
    if not options.train:
        raise ConfigError("data.train is not set: give data.train=FILE")
    paths = [find_data("data.train", options.train)]
    options = replace(
        options,
        train_split=own_split("data.train", options.train) or options.train_split,
        eval_split=own_split("data.eval", options.eval) or options.eval_split,
        validation_split=own_split("data.validation", options.validation)
        or options.validation_split,
    )
    splits = [options.train_split]
    if not options.eval and has_split("data.train", paths[0], options.eval_split):
        options = replace(options, eval=options.train)
    if options.eval:
        paths.append(find_data("data.eval", options.eval))
        splits.append(options.eval_split)
        is_same = paths[0].resolve() == paths[1].resolve()
        if is_same and (paths[0].is_file() or splits[0] == splits[1]):
            raise ConfigError(
                f"data.eval={options.eval}: it is the same data as data.train; name other data, or"
                " unset it and use data.eval_size"
            )
    files = [
        tuple(files_of(key, path, split))
        for key, path, split in zip(("data.train", "data.eval"), paths, splits, strict=False)
    ]
    options, validation = _find_validation(options, paths, splits)
    if validation is not None:
        paths.append(validation)
        files.append(tuple(files_of("data.validation", validation, options.validation_split)))
    _check_shared(options, files)
    stamps = tuple((str(f), f.stat().st_mtime_ns, f.stat().st_size) for own in files for f in own)
    settings = json.dumps({name: getattr(options, name) for name in DATA_SETTINGS})
    return _load(settings, tuple(paths), stamps)


def _check_shared(options: DatasetOptions, files: Sequence[Sequence[Path]]) -> None:
    """Raise ConfigError if a file has the records of two splits."""
    names = ["train", *filter(partial(getattr, options), ("eval", "validation"))]
    resolved = [{path.resolve() for path in own} for own in files]
    for first, second in combinations(range(len(names)), 2):
        if shared := resolved[first] & resolved[second]:
            name = names[second]
            raise ConfigError(
                f"data.{name}={getattr(options, name)}: {min(shared)} is also a file of"
                f" data.{names[first]}; name other files"
            )


def _find_validation(
    options: DatasetOptions, paths: Sequence[Path], splits: Sequence[str]
) -> tuple[DatasetOptions, Path | None]:
    """Return the options and the path of the validation records; None: there are none.

    Raises: ConfigError: they are the data of another split.
    """
    split = options.validation_split
    is_in_train = split not in splits and has_split("data.train", paths[0], split)
    if not options.validation and is_in_train:
        options = replace(options, validation=options.train)
    if not options.validation:
        return options, None
    path = find_data("data.validation", options.validation)
    for other, name in zip(paths, splits, strict=True):
        if path.resolve() == other.resolve() and (path.is_file() or split == name):
            raise ConfigError(
                f"data.validation={options.validation}: it is the same data as data.train or"
                " data.eval; name other data, or unset it and use data.validation_size"
            )
    return options, path


DATA_SETTINGS = (
    *("train", "eval", "validation", "prompt", "answer", "template", "system", "tokenizer"),
    *ITEM_SETTINGS,
    *LATER_SETTINGS,
)


@lru_cache(maxsize=2)
def _load(settings: str, paths: tuple[Path, ...], stamps: object) -> Dataset:
    """Return the records of the configured files; see `load_dataset`."""
    options = DatasetOptions(**json.loads(settings))
    train = read_records("data.train", paths[0], options.train_split)
    content = _content_of("data.train", paths[0], options.train_split)
    prompts = PromptMaker(options, train[0])
    name = paths[0].name
    _check_prompts(prompts, train, name)
    numbers = _kept(options, prompts, train, name)
    data = DataSplit(name=name, records=train, numbers=numbers)
    if options.eval:
        eval_records = read_records("data.eval", paths[1], options.eval_split)
        content |= _content_of("data.eval", paths[1], options.eval_split)
        if content["data.eval"] == content["data.train"]:
            raise ConfigError(f"data.eval={options.eval}: it has the same content as data.train")
        eval_name = paths[1].name
        _check_prompts(prompts, eval_records, eval_name)
        test = DataSplit(
            name=eval_name,
            records=eval_records,
            numbers=_kept(options, prompts, eval_records, eval_name),
        )
    else:
        held_out = _held_out(options, numbers)
        test = DataSplit(name=name, records=train, numbers=held_out)
        numbers = _without(prompts, replace(data, numbers=numbers), test)
    if options.validation:
        path = paths[-1]
        validation_records = read_records("data.validation", path, options.validation_split)
        added = _content_of("data.validation", path, options.validation_split)
        if added["data.validation"] in content.values():
            raise ConfigError(
                f"data.validation={options.validation}: it has the same content as data.train or"
                " data.eval"
            )
        content |= added
        _check_prompts(prompts, validation_records, path.name)
        validation = DataSplit(
            name=path.name,
            records=validation_records,
            numbers=_kept(options, prompts, validation_records, path.name),
        )
    else:
        chosen = _held_out(options, numbers, key="validation_size")
        validation = DataSplit(name=name, records=train, numbers=chosen)
        numbers = _without(prompts, replace(data, numbers=numbers), validation)
    if options.shuffle >= 0:
        random.Random(f"shuffle/{options.shuffle}").shuffle(numbers)
    if options.train_size >= 0:
        numbers = numbers[: options.train_size]
    if not numbers:
        raise ConfigError(f"data.train={options.train}: no record is left for training")
    item_settings = {name: getattr(options, name) for name in ITEM_SETTINGS}
    default = DatasetOptions()
    for setting in LATER_SETTINGS:  # A run that began without them continues.
        if (value := getattr(options, setting)) != getattr(default, setting):
            item_settings[setting] = value
    item_settings["tokenizer"] = _tokenizer_digest(options) if options.max_length else ""
    content["data settings"] = hashlib.sha256(json.dumps(item_settings).encode()).hexdigest()
    splits = {"train": DataSplit(name=name, records=train, numbers=numbers), "test": test}
    splits["validation"] = validation
    _warn_of_copies(prompts, splits)
    _warn_of_unused_sizes(options, splits)
    made = Dataset(prompts=prompts, splits=splits, content=content)
    for split, data_split in splits.items():  # A template that fails does so before the start.
        if data_split.numbers:
            made.question(split, 0)
    return made


def _content_of(key: str, path: Path, split: str) -> dict[str, str]:
    """Return the digest of a split's files and, of a dataset of the Hub, its commit."""
    files = files_of(key, path, split)
    content = {key: digest_of(files)}
    if not path.exists():
        content[f"{REVISION}{key}"] = commit_of(files)
        logger.info("dataset %s=%s split=%s revision=%s", key, path, split, commit_of(files))
    return content


def _check_prompts(prompts: PromptMaker, records: Sequence[Record], name: str) -> None:
    """Check that every record has a prompt. Raises: ConfigError."""
    for number, record in enumerate(records, 1):
        prompts.check(record, f"record {number} of {name}")


def _held_out(
    options: DatasetOptions, numbers: Sequence[int], *, key: str = "eval_size"
) -> list[int]:
    """Return the records that are held out of the training file. Raises: ConfigError.

    Args:
        key: the setting with their number: eval_size or validation_size.
    """
    size: int = getattr(options, key)
    if size < 0:
        is_test = key == "eval_size"
        size = min(MAX_HELD_OUT, int(HELD_OUT_FRAC * len(numbers))) if is_test else 0
    if size >= len(numbers):
        num = counted(len(numbers), "record")
        raise ConfigError(f"data.{key}={size}: data.train has only {num} for it")
    drawn = random.Random("held out" if key == "eval_size" else key)
    return sorted(drawn.sample(list(numbers), size))


def _kept(
    options: DatasetOptions, prompts: PromptMaker, records: Sequence[Record], name: str
) -> list[int]:
    """Return the indices of the records whose prompt is short enough. Raises: ConfigError."""
    if not options.max_length:
        return list(range(len(records)))
    tokenizer = load_tokenizer(options)
    unit = "tokens" if tokenizer is not None else "characters"
    numbers: list[int] = []
    for index, record in enumerate(records):
        question = prompts.make(record, f"record {index + 1} of {name}")
        text = "\n".join(each["content"] for each in question.messages)
        length = len(text) if tokenizer is None else len(tokenizer.encode(text).ids)
        if length <= options.max_length:
            numbers.append(index)
    left_out = len(records) - len(numbers)
    logger.info(
        "dataset file=%s records=%d longer_than=%d %s left_out=%d",
        name,
        len(records),
        options.max_length,
        unit,
        left_out,
    )
    if not numbers:
        raise ConfigError(
            f"data.max_length={options.max_length}: every prompt of {name} has more {unit}"
        )
    return numbers


def _tokenizer_path(options: DatasetOptions) -> Path | None:
    """Return the tokenizer's file. Raises: ConfigError: it does not exist."""
    if not options.tokenizer:
        return None
    path = find_path("data.tokenizer", options.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"data.tokenizer={options.tokenizer}: {path} does not exist")
    return path


def load_tokenizer(options: DatasetOptions) -> Any:
    """Return the tokenizer of `data.tokenizer`; None without one."""
    path = _tokenizer_path(options)
    if path is None:
        return None
    from tokenizers import Tokenizer  # Imported here, because few datasets need it.

    return Tokenizer.from_file(str(path))


def _tokenizer_digest(options: DatasetOptions) -> str:
    """Return the digest of the tokenizer's file; "" without one."""
    path = _tokenizer_path(options)
    return "" if path is None else digest_of([path])


def _without(prompts: PromptMaker, data: DataSplit, held_out: DataSplit) -> list[int]:
    """Return the records whose prompts are not held out; all others if no such record is left."""
    others = sorted({*data.numbers} - {*held_out.numbers})
    if not held_out.numbers:
        return others
    texts = _texts(prompts, replace(data, numbers=others))
    seen = {*_texts(prompts, held_out)}
    left = [number for number, text in zip(others, texts, strict=True) if text not in seen]
    num_copies = len(others) - len(left)
    if num_copies and not left:
        logger.warning(
            "dataset: all %d records are copies of held-out prompts, and are trained", num_copies
        )
        return others
    if num_copies:
        logger.warning(
            "dataset: copies of held-out prompts are not trained num=%d of=%d",
            num_copies,
            len(others),
        )
    return left


def _texts(prompts: PromptMaker, split: DataSplit) -> list[str]:
    """Return the prompts of the items as texts that can be compared."""
    return [
        prompts.raw_prompt(split.record(index), split.place(index))
        for index in range(len(split.numbers))
    ]


def _warn_of_copies(prompts: PromptMaker, splits: dict[str, DataSplit]) -> None:
    """Warn about prompts that are in two splits."""
    texts = {name: _texts(prompts, split) for name, split in splits.items()}
    for first, second in (("train", "test"), ("train", "validation"), ("validation", "test")):
        seen = {*texts[first]}
        num = sum(text in seen for text in texts[second])
        if num:
            logger.warning(
                "dataset: %s data contain prompts of the %s data num=%d of=%d",
                first,
                second,
                num,
                len(texts[second]),
            )


def _warn_of_unused_sizes(options: DatasetOptions, splits: dict[str, DataSplit]) -> None:
    """Warn about numbers of held-out records that come from data of their own."""
    for key, split in (("eval", "test"), ("validation", "validation")):
        size = getattr(options, f"{key}_size")
        if getattr(options, key) and size >= 0:
            logger.warning(
                "dataset: data.%s_size=%d has no effect: the %s data are all %d records of %s;"
                " eval.num_items limits an evaluation",
                key,
                size,
                split,
                len(splits[split].numbers),
                splits[split].name,
            )
