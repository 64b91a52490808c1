"""Advantages of groups that were sampled as trees (`groups.forks`).

A tree is a member, the trunk, and the forks that continue its episode from one of its turns.

    A = A_group + A_tree            A_tree = 0 if the tree is the whole group
    A(shared turn) = mean of A over the members that share the turn

A_group and A_tree are the advantages of the same estimator among the members of the group and of
the tree. Each sampled token is trained once, in the trunk if it is shared. Its gradient is then the
mean of the gradients that it would have in the rows of all members that share it. A_tree cancels in
turns that the whole tree shares, and compares continuations from equal states after them.

Source: Tree-GRPO, arXiv:2509.21240, which adds both advantages and trains a shared token in each
row, so with the sum instead of the mean; ARPO, arXiv:2507.19849, has the mean for shared tokens.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from common.config.algorithm import AlgorithmSection
from common.config.groups import GroupsSection
from common.segments import shared_digest
from common.wire.messages import Trajectory
from learner.algorithms.interface import GroupAdvantages

if TYPE_CHECKING:
    from torch import Tensor

OfGroup = Callable[["Tensor", Sequence[Trajectory], AlgorithmSection], GroupAdvantages]


def formula(groups: GroupsSection) -> str:
    """Return the advantage of a group that is sampled as trees, for the printed objective."""
    of_tree = " + A_tree" if groups.size > 1 + groups.forks else ""
    turns = ", ".join(map(str, groups.fork_turns))
    return f"A=A_group{of_tree}, mean_members A in shared turns; forks after turns {turns}"


def trees_of(members: Sequence[Trajectory]) -> list[list[int]]:
    """Return the indices of each tree's members, the trunk first; only trees with forks.

    A fork whose trunk is absent belongs to no tree. The same holds after its trunk began anew, so
    that it has other tokens in the shared turns.
    """
    places = {member.member: index for index, member in enumerate(members)}
    trees: dict[int, list[int]] = {}
    for index, fork in enumerate(members):
        num = fork.num_shared_turns
        trunk = places.get(fork.trunk) if num else None
        if trunk is None or members[trunk].num_shared_turns or members[trunk].num_turns < num:
            continue
        if shared_digest(members[trunk], num) == fork.shared_digest:
            trees.setdefault(trunk, [trunk]).append(index)
    return list(trees.values())


def with_trees(
    members: Sequence[Trajectory], rewards: Tensor, algorithm: AlgorithmSection, of_group: OfGroup
) -> GroupAdvantages:
    """Return the advantages of a group's members and of their turns.

    Args:
        rewards: [member], the credit of each episode.
        of_group: the estimator of a group.
    """
    advantages, turns = of_group(rewards, members, algorithm)
    trees = trees_of(members)
    if not trees:
        return advantages, turns
    advantages = advantages.clone()
    of_turns = [
        np.zeros(member.num_turns, np.float32) if turns is None else turns[index].copy()
        for index, member in enumerate(members)
    ]
    for tree in trees:
        if len(tree) < len(members):
            own, own_turns = of_group(rewards[tree], [members[index] for index in tree], algorithm)
            for place, index in enumerate(tree):
                advantages[index] += own[place]
                if own_turns is not None:
                    of_turns[index] += own_turns[place]
    for trunk, *forks in trees:
        # The trunk's sum for each turn becomes the mean over the members that share the turn.
        sums = of_turns[trunk] + float(advantages[trunk])
        counts = np.ones_like(sums)
        for fork in forks:
            num = members[fork].num_shared_turns
            sums[:num] += of_turns[fork][:num] + float(advantages[fork])
            counts[:num] += 1
        of_turns[trunk] = (sums / counts - float(advantages[trunk])).astype(np.float32)
    return advantages, of_turns
