"""Resources that each role requests, and a check that a cluster has them. Ray places roles."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.config.actor import GpuPlacement
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.text import counted
from tools.checks.gpu_placement import assign_gpus, trains_on_gpu

ON_RUN_NODE = "on the node of the run directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One node of a cluster."""

    node_id: str
    host: str
    num_cpus: float
    num_gpus: int
    labels: dict[str, str] = field(default_factory=lambda: {})
    is_home: bool = False  # Node of the launcher and the run directory.

    @property
    def text(self) -> str:
        """The node as text."""
        labels = [f"{k}={v}" for k, v in self.labels.items() if k != "ray.io/node-id"]
        has = f"{self.num_cpus:g} CPU, {self.num_gpus} GPU"
        return f"{self.host}: {', '.join([has, *labels])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Resources that a role requests from Ray."""

    num_cpus: float
    num_gpus: int = 0
    labels: dict[str, str] = field(default_factory=lambda: {})  # Ray's label selector.
    is_home: bool = False
    is_apart: bool = False  # On a node apart from the run's, and from that of an equal request.

    @property
    def text(self) -> str:
        """The request as text, such as "a node with 1 CPU, 2 GPU and zone=a"."""
        gpus = f", {self.num_gpus} GPU" if self.num_gpus else ""
        labels = "".join(f" and {k}={v}" for k, v in self.labels.items())
        where = f" {ON_RUN_NODE}" if self.is_home else ""
        node = "a node of its own" if self.is_apart else "a node"
        return f"{node} with {self.num_cpus:g} CPU{gpus}{labels}{where}"

    def num_fitting(self, node: ClusterNode) -> int:
        """Return the number of such requests that fit on the otherwise empty node."""
        is_right = all(_selects(text, node.labels.get(k, "")) for k, text in self.labels.items())
        is_excluded = self.is_apart if node.is_home else self.is_home
        if not is_right or is_excluded:
            return 0
        by_cpu = node.num_cpus / self.num_cpus if self.num_cpus else float("inf")
        by_gpu = node.num_gpus / self.num_gpus if self.num_gpus else float("inf")
        return int(min(by_cpu, by_gpu, 1 if self.is_apart else 10**6))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlacement:
    """Resources that the roles of a run request."""

    learner: Needs  # Its first node.
    ranks: Needs  # Each of its further nodes.
    num_rank_nodes: int
    envhub: Needs | None  # None: the run uses an external hub.
    actor: Needs
    # GPUs that the processes of the first actors share with the learner.
    shared: tuple[tuple[int, ...], ...] = ()
    num_actors: int
    num_fitting: int  # Actors that currently fit on an otherwise idle cluster.

    def lines(self, nodes: Sequence[ClusterNode]) -> list[str]:
        """Return the placement as text, one line per kind of role."""
        num = counted(self.num_rank_nodes, "further node")
        apart = self.num_actors - len(self.shared)
        fit = counted(self.num_actors, "actor fits", "actors fit")
        waiting = "; the others start when a node joins" * (self.num_fitting < self.num_actors)
        lines = {
            f"learner: {self.learner.text}": True,
            f"learner, {num}, each: {self.ranks.text}": self.num_rank_nodes,
            f"scheduler: {ON_RUN_NODE}": True,
            f"envhub: {self.envhub.text if self.envhub else ''}": self.envhub,
            f"{counted(len(self.shared), 'actor')}: on the learner's GPUs": self.shared,
            f"{counted(apart, 'actor')}, each: {self.actor.text}": apart,
        }
        return [
            *(f"ray node {node.text}{f', {ON_RUN_NODE}' * node.is_home}" for node in nodes),
            *(f"ray {line}" for line, is_shown in lines.items() if is_shown),
            f"ray: {self.num_fitting} of {fit} on the nodes{waiting}",
        ]


def num_cpus_wanted(cfg: RunConfig) -> float:
    """Return the number of CPUs that all roles request together."""
    ray = cfg.ray
    has_hub = not cfg.envhub.url
    return ray.learner_cpus + has_hub * ray.envhub_cpus + cfg.actor.num_processes * ray.actor_cpus


def place(cfg: RunConfig, nodes: Sequence[ClusterNode]) -> ClusterPlacement:
    """Return the requests of all roles on a cluster of these nodes.

    With `actor.placement=auto` the engines are separate from the learner if at least one fits
    beside it; the remaining engines wait for nodes. Colocated, the first engines share the
    learner's GPUs, and the remaining engines are separate.

    Raises: ConfigError: a role fits on no idle node; the message lists the cluster's resources.
    """
    (home,) = (node for node in nodes if node.is_home)
    num_actors = cfg.actor.num_processes
    width = cfg.actor.engines_per_process * cfg.actor.tensor_parallel_size
    labels = selector(cfg.ray.actor_labels)
    chosen = [node for node in nodes if Needs(num_cpus=0, labels=labels).num_fitting(node)]
    has_gpus = any(node.num_gpus for node in chosen) or cfg.actor.tensor_parallel_size > 1
    actor = Needs(num_cpus=cfg.ray.actor_cpus, num_gpus=width if has_gpus else 0, labels=labels)
    learner = _needs_of_learner(cfg, nodes)
    labels_of_ranks = selector(cfg.ray.learner_labels)
    ranks = replace(learner, labels=labels_of_ranks, is_home=False, is_apart=True)
    rest = [_without_needs(node, learner) if node.is_home else node for node in nodes]
    rest = _beside_ranks(rest, ranks, cfg.learner.num_nodes - 1)
    num_apart = sum(actor.num_fitting(node) for node in rest)
    shared: tuple[tuple[int, ...], ...] = ()
    wants_sharing = cfg.actor.placement is GpuPlacement.COLOCATED
    is_crowded = cfg.actor.placement is GpuPlacement.AUTO and not num_apart
    if learner.num_gpus >= width and (wants_sharing or is_crowded) and home in chosen:
        shared = _shared_gpus(cfg, min(num_actors, learner.num_gpus // width))
    elif cfg.actor.num_actors:
        _check_fits("actor", actor, rest, remedy="change ray.actor_labels or ray.actor_cpus")
    envhub = None
    if not cfg.envhub.url:
        envhub = Needs(num_cpus=cfg.ray.envhub_cpus, labels=selector(cfg.ray.envhub_labels))
        _check_fits("envhub", envhub, rest, remedy="change ray.envhub_labels or ray.envhub_cpus")
    return ClusterPlacement(
        learner=learner,
        ranks=ranks,
        num_rank_nodes=cfg.learner.num_nodes - 1,
        envhub=envhub,
        actor=actor,
        shared=shared,
        num_actors=num_actors,
        num_fitting=min(num_actors, num_apart + len(shared)),
    )


def selector(labels: Sequence[str]) -> dict[str, str]:
    """Return Ray's label selector for texts of the form "key=value"."""
    return {key: value for key, _, value in (label.partition("=") for label in labels)}


def _needs_of_learner(cfg: RunConfig, nodes: Sequence[ClusterNode]) -> Needs:
    """Return the request of the learner's first node. Raises: ConfigError: that node lacks it."""
    if cfg.learner.device.partition(":")[2].strip("0"):
        raise ConfigError(
            f"learner.device={cfg.learner.device}: Ray chooses the GPUs. Use learner.device=cuda"
        )
    is_cuda = trains_on_gpu(cfg, num_gpus=sum(node.num_gpus for node in nodes))
    num_gpus = cfg.learner.local_ranks if is_cuda else 0
    learner = Needs(num_cpus=cfg.ray.learner_cpus, num_gpus=num_gpus, is_home=True)
    remedy = "start run.py on a node with these GPUs, or use learner.device=cpu" if is_cuda else ""
    home = [node for node in nodes if node.is_home]
    _check_fits("learner", learner, home, remedy=remedy or "lower ray.learner_cpus")
    return learner


def _shared_gpus(cfg: RunConfig, num_actors: int) -> tuple[tuple[int, ...], ...]:
    """Return the learner's GPUs that each of the first actors shares with it."""
    learner = replace(cfg.learner, device="cuda")
    colocated = GpuPlacement.COLOCATED
    # Its own number of GPUs would count all actors.
    actor = replace(cfg.actor, num_actors=num_actors, num_spares=0, num_gpus=0, placement=colocated)
    alone = replace(cfg, learner=learner, actor=actor)
    return assign_gpus(alone, num_gpus=cfg.learner.local_ranks).processes


def _without_needs(node: ClusterNode, needs: Needs) -> ClusterNode:
    """Return a node without the resources that a role takes from it."""
    return replace(
        node, num_cpus=node.num_cpus - needs.num_cpus, num_gpus=node.num_gpus - needs.num_gpus
    )


def _beside_ranks(nodes: Sequence[ClusterNode], ranks: Needs, num: int) -> list[ClusterNode]:
    """Return the nodes without the resources of the learner's further nodes.

    Ray prefers the nodes with the most free resources. This is an estimate of its choice.

    Raises: ConfigError: there are too few nodes.
    """
    remedy = "add nodes to the cluster of ray.address, or lower learner.num_nodes"
    _check_fits("learner", ranks, nodes, num=num, remedy=remedy)
    fitting = [node for node in nodes if ranks.num_fitting(node)]
    taken = sorted(fitting, key=lambda node: (-node.num_gpus, -node.num_cpus))[:num]
    return [_without_needs(node, ranks) if node in taken else node for node in nodes]


def _check_fits(
    role: str, needs: Needs, nodes: Sequence[ClusterNode], *, num: int = 1, remedy: str
) -> None:
    """Check that `num` nodes of the cluster can hold a role. Raises: ConfigError."""
    if lack := shortage(role, needs, nodes, num=num):
        raise ConfigError(f"launcher=ray: {lack}; {remedy}")


def shortage(role: str, needs: Needs, nodes: Sequence[ClusterNode], *, num: int = 1) -> str:
    """Return the lack of nodes for a role, with the resources of all nodes; "" without a lack.

    Args:
        num: number of nodes, each of which must fulfil the request.
    """
    num_missing = num - sum(needs.num_fitting(node) > 0 for node in nodes)
    if num_missing <= 0:
        return ""
    wanted = needs.text if num == 1 else f"{num} times {needs.text}"
    lack = "no node has it" if num == 1 else f"{num_missing} of {num} are missing"
    beside = " beside the learner" if role != "learner" else ""
    has = "; ".join(node.text for node in nodes)
    return f"{role} needs {wanted}, and {lack}{beside} ({has})"


def _selects(text: str, value: str) -> bool:
    """Return whether a label's value matches Ray's selector: a, !a, in(a, b), !in(a, b)."""
    is_not = text.startswith("!")
    rest = text.removeprefix("!")
    several = re.fullmatch(r"in\((.*)\)", rest)
    among = [each.strip() for each in several[1].split(",")] if several else [rest]
    return (value in among) != is_not
