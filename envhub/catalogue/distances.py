"""Distances of items: the turns that the expert needs, and the items within a range of turns.

Distances are declared by the environment, or measured by playing the expert on the first items of a
subset. Measured ones are cached on disk until the environment's code, options or packages change.
"""

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any, cast

from common.config.envs import EnvsSection
from common.host.process_settings import cache_home
from common.ids import distance_of
from common.repository import CODE
from common.store.run_dir import write_atomically
from envhub.catalogue.registry import REQUIREMENTS, Registry
from envhub.env import SPLITS, Env, EnvSpec, Isolation, Style, UnknownItem, split_item

logger = logging.getLogger(__name__)

NUM_MEASURED = 4_000  # Items measured per subset and split, from the first one.
# split -> turns of the expert by item; 0: the expert does not solve it.
Turns = dict[str, list[int]]


def measured(spec: EnvSpec, subset: str, options: EnvsSection) -> Turns:
    """Return the turns that the expert needs for the items of a subset; {}: not measured.

    Turns that the environment does not declare are measured in the hub's own process only, which
    takes seconds at most.
    """
    if subset not in spec.subsets:
        return {}
    sizes = {split: spec.subsets[subset].size(split) for split in SPLITS}
    sizes = {split: size for split, size in sizes.items() if size or split != "validation"}
    if subset in spec.expert_turns:
        declared = spec.expert_turns[subset]
        return {split: [declared(i) for i in range(size)] for split, size in sizes.items()}
    if spec.isolation is not Isolation.INLINE:
        return {}
    folder = cache_home() / "longstride" / "distances"
    path = folder / f"{spec.name}-{_digest(spec, subset, options)}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass
    env = cast(Env, spec.make(Style.COMPACT))
    most = spec.subsets[subset].max_turns
    turns = {
        split: [_play(env, f"{subset}-{split}-{i}", most) for i in range(min(size, NUM_MEASURED))]
        for split, size in sizes.items()
    }
    env.close()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(turns))
    except OSError as error:
        logger.info("failed to save distances path=%s reason=%s", path, error.strerror)
    return turns


def _play(env: Env, item_id: str, most: int) -> int:
    """Return the turns that the expert needs for an item; 0: it does not solve the item."""
    env.reset(item_id, 0)
    for turn in range(most):
        action = env.expert_action()
        if action is None:
            return 0
        result = env.step(action)
        if result.done:
            return turn + 1 if result.is_success else 0
    return 0


def _digest(spec: EnvSpec, subset: str, options: EnvsSection) -> str:
    """Return a key that changes with every input on which the expert's turns may depend."""
    modules = [name for need in REQUIREMENTS.get(spec.name, ()) for name in need.modules]
    size = asdict(spec.subsets[subset])
    parts = [
        subset,
        size,
        asdict(options),
        NUM_MEASURED,
        [(name, version(name)) for name in modules],
    ]
    digest = hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=12)
    envs = CODE / "envhub" / "envs"
    for path in sorted([*envs.glob(f"{spec.name}.py"), *envs.glob(f"{spec.name}/*.*")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def counted(turns: Turns) -> dict[str, dict[int, int]]:
    """Return split -> turns -> number of items, without items that the expert does not solve."""
    counts = {split: Counter(each for each in found if each) for split, found in turns.items()}
    return {split: dict(sorted(each.items())) for split, each in counts.items()}


class Distances:
    """The items at a distance, for one event loop: each subset is measured once, in a thread.

    Example: "GoTo@4..8-train-3" is the fourth training item of GoTo for which the expert needs four
    to eight turns.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known: dict[tuple[str, str], asyncio.Task[Turns]] = {}

    async def plain(self, env: str, item_id: str) -> str:
        """Return the environment's own id of an item. Raises: UnknownItem: no such item."""
        item = split_item(item_id)
        far = distance_of(item.subset) if item else None
        if item is None or far is None:
            return item_id
        subset, low, high = far
        lengths = (await self._turns(env, subset)).get(item.split, [])
        indices = [index for index, turns in enumerate(lengths) if low <= turns <= high]
        if item.index >= len(indices):
            raise UnknownItem(f"item {item_id!r} is out of range: there are {len(indices)}")
        return f"{subset}-{item.split}-{indices[item.index]}"

    async def catalogue(self, wanted: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the registry's catalogue, extended by the wanted distance ranges.

        Args:
            wanted: "env/subset@low..high"; unknown names are ignored, since other hubs may serve
                them.
        """
        body = self._registry.catalogue()
        for name in wanted:
            env, _, items = name.partition("/")
            subset, low, high = distance_of(items) or (items, 1, 0)
            if env not in body or not (turns := await self._turns(env, subset)):
                continue
            counts = counted(turns)
            body[env].setdefault("distances", {})[subset] = counts
            num = {split: _within(each, low, high) for split, each in counts.items()}
            sizes = {f"num_{split}": size for split, size in num.items()}
            body[env]["subsets"][items] = body[env]["subsets"][subset] | (sizes if high else {})
        return body

    async def _turns(self, env: str, subset: str) -> Turns:
        """Return the turns of a subset's items, measured once."""
        if (env, subset) not in self._known:
            measure = partial(measured, self._registry.spec(env), subset, self._registry.options)
            self._known[env, subset] = asyncio.create_task(asyncio.to_thread(measure))
        return await asyncio.shield(self._known[env, subset])


def _within(counts: Mapping[int, int], low: int, high: int) -> int:
    return sum(num for turns, num in counts.items() if low <= turns <= high)
