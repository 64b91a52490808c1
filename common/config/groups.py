"""The section `groups`: groups of episodes for a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.config.horizon import MAX_TURNS
from common.config.knobs import ANY_TEXT, FUNCTION, Contradiction, knob, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSection:
    """Groups of episodes for a step."""

    size: int = knob(
        8,
        "Sets the number of episodes of one item. 1 needs algorithm.advantage=running, "
        "reinforce_pp or ppo.",
        ge=1,
        le=4096,
    )
    per_step: int = knob(
        16, "Sets the number of groups with signal in one optimizer step.", ge=1, le=10**5
    )
    min_size: int = knob(
        4,
        "Discards a group of which failures leave fewer episodes than this. A smaller size is the"
        " default instead.",
        ge=1,
        le=4096,
        must="be at most size",
    )
    forks: int = knob(
        0,
        "Samples a group as trees: of 1 + forks members one begins at the first turn, and the"
        " others continue its episode from one of its turns, see docs/TREES.md. 0 makes no forks.",
        ge=0,
        le=4095,
    )
    fork_turns: list[int] = knob(
        [2],
        "Lists the numbers of turns after which the forks of an episode continue it. The forks take"
        " them in rotation.",
        ge=1,
        le=MAX_TURNS,
    )
    reward: Any = knob(
        None,
        "Names a function that compares the finished members of a group and returns a number for "
        "each: module:function or file.py:function. A map from names to functions, or to sections "
        "with function, weight, min, max, timeout_s and retries, adds several, see "
        "docs/DATASETS.md.",
        form=ANY_TEXT,
    )
    reward_timeout_s: float = seconds(
        60.0, "Limits the seconds of a call of a function over a group.", gt=0
    )
    environment_weight: float = knob(
        1.0,
        "Sets the weight of the environment's reward beside groups.reward. 0 leaves it out.",
        ge=0,
        le=1e6,
    )
    max_oversample: float = knob(
        3.0, "Limits the groups drawn for one step to this multiple of per_step.", ge=1, le=1000
    )
    filter: str = knob(
        "",
        "Names your own function, which decides whether a complete group is trained. Empty keeps "
        "all groups with signal.",
        form=FUNCTION,
        also="",
    )
    straggler_factor: float = knob(
        0.0,
        "Issues an episode again that takes this multiple of the 95th percentile of the durations"
        " in its environment and at its horizon. 0 turns it off.",
        also=0,
        ge=1,
        le=1000,
    )
    straggler_min_s: float = seconds(
        30.0, "Issues no episode again as a straggler before this many seconds.", gt=0
    )

    def trunk_of(self, member: int) -> int:
        """Return the member whose episode a member continues; itself if it is no fork."""
        return member - member % (1 + self.forks)

    def fork_turn(self, member: int) -> int:
        """Return the number of turns that a member shares with its trunk; 0 if it is no fork."""
        number = member % (1 + self.forks)
        return self.fork_turns[(number - 1) % len(self.fork_turns)] if number else 0

    def forks_of(self, member: int) -> range:
        """Return the forks of a member; none if it is a fork itself."""
        first = member + 1
        return range(first, first + self.forks * (self.trunk_of(member) == member))

    def contradictions(self) -> Iterator[Contradiction]:
        if self.forks and self.size % (1 + self.forks):
            sizes = f"trees of {1 + self.forks} members, which do not fill groups.size={self.size}"
            yield "forks", self.forks, f"makes {sizes}; choose a multiple"
        if self.forks and not self.fork_turns:
            yield "fork_turns", [], "must name a turn, as groups.forks does not begin at the first"
        if self.reward and self.size < 2:
            yield "reward", self.reward, "needs groups.size >= 2: it compares members of a group"
