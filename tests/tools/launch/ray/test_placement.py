"""Laws of what each role asks Ray for, and of what no cluster can give."""

import re
from dataclasses import replace

import pytest

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from tools.checks.gpu_placement import assign_gpus
from tools.launch.ray.placement import ClusterNode, Needs, num_cpus_wanted, place

HEAD = ClusterNode(node_id="h", host="10.0.0.1", num_cpus=8, num_gpus=4, is_home=True)
GPU = ClusterNode(node_id="g", host="10.0.0.2", num_cpus=8, num_gpus=4, labels={"kind": "h100"})
CPU = ClusterNode(node_id="c", host="10.0.0.3", num_cpus=16, num_gpus=0, labels={"kind": "cpu"})
LAPTOP = ClusterNode(node_id="l", host="127.0.0.1", num_cpus=4, num_gpus=0, is_home=True)


def config(*overrides: str) -> RunConfig:
    device = [] if any("learner.device" in each for each in overrides) else ["learner.device=auto"]
    return load_config("smoke", ["launcher=ray", *device, *overrides])


def test_engines_and_learner_request_their_gpu_counts() -> None:
    overrides = ("learner.num_ranks=2", "actor.num_actors=9", "actor.tensor_parallel_size=2")
    wanted = place(config(*overrides), [HEAD, GPU, CPU])
    assert (wanted.learner.num_gpus, wanted.learner.is_home) == (2, True)
    assert (wanted.actor.num_gpus, wanted.actor.is_home) == (2, False)
    assert wanted.envhub == Needs(num_cpus=1)
    assert wanted.num_fitting == 3  # 2 GPUs are left beside the learner, 4 on the other node
    assert (
        "3 of 9 actors fit on the nodes; the others start when a node joins"
        in wanted.lines([HEAD])[-1]
    )


def test_process_of_several_engines_requests_all_their_gpus() -> None:
    overrides = ("actor.num_actors=3", "actor.engines_per_process=2", "ray.actor_cpus=2")
    cfg = config(*overrides)
    wanted = place(cfg, [HEAD, GPU])
    assert (wanted.actor.num_gpus, wanted.num_actors) == (2, 3)
    assert wanted.num_fitting == 3  # One in the 3 GPUs beside the learner, two on the other node.
    assert num_cpus_wanted(cfg) == 1 + 1 + 3 * 2
    shared = place(config(*overrides, "actor.placement=colocated", "learner.num_ranks=4"), [HEAD])
    assert shared.shared == ((0, 1), (2, 3))


def test_cpu_engines_are_counted_beside_the_learner() -> None:
    overrides = ("actor.num_actors=50", "ray.actor_cpus=0.5", "ray.learner_cpus=3")
    wanted = place(config(*overrides), [LAPTOP])
    assert (wanted.num_fitting, wanted.actor.num_gpus) == (2, 0)


@pytest.mark.parametrize("placement", ["colocated", "auto"])
def test_colocated_engines_share_gpus_as_locally(placement: str) -> None:
    ranks = 4 if placement == "auto" else 2  # auto shares only where nothing else is left
    overrides = (
        f"learner.num_ranks={ranks}",
        "actor.num_actors=5",
        "actor.tensor_parallel_size=2",
        f"actor.placement={placement}",
    )
    cfg = config(*overrides)
    wanted = place(cfg, [HEAD])
    assert wanted.shared == assign_gpus(cfg, num_gpus=4).actors[: ranks // 2]
    assert wanted.actor.num_gpus == 2  # Those that do not share.
    assert wanted.num_fitting == 2  # two that share, or one that shares and one apart


def test_learner_nodes_are_distinct_and_reserved_before_actors() -> None:
    third = replace(GPU, node_id="t", host="10.0.0.4", num_gpus=8)
    overrides = ("learner.num_nodes=3", "learner.ranks_per_node=4", "actor.num_actors=9")
    wanted = place(config(*overrides), [HEAD, GPU, CPU, third])
    assert (wanted.ranks.num_gpus, wanted.ranks.is_home, wanted.num_rank_nodes) == (4, False, 2)
    assert [wanted.ranks.num_fitting(node) for node in (HEAD, GPU, CPU, third)] == [0, 1, 0, 1]
    assert wanted.num_fitting == 4  # The ranks leave 4 of the 8 GPUs of the third node.
    lines = wanted.lines([HEAD])
    assert "ray learner: a node with 1 CPU, 4 GPU on the node of the run directory" in lines
    assert "ray learner, 2 further nodes, each: a node of its own with 1 CPU, 4 GPU" in lines


def test_labels_choose_the_further_nodes_of_the_learner() -> None:
    overrides = ("learner.num_nodes=2", "learner.device=cpu", "ray.learner_labels=[kind=cpu]")
    wanted = place(config(*overrides), [HEAD, GPU, CPU])
    assert [wanted.ranks.num_fitting(node) for node in (HEAD, GPU, CPU)] == [0, 0, 1]
    assert wanted.ranks.text == "a node of its own with 1 CPU and kind=cpu"


@pytest.mark.parametrize(
    ("overrides", "nodes", "message"),
    [
        (
            ["learner.num_nodes=4", "learner.ranks_per_node=4"],
            [HEAD, GPU, CPU],
            "learner needs 3 times a node of its own with 1 CPU, 4 GPU, and 2 of 3 are missing (10",
        ),
        (["learner.num_nodes=2"], [LAPTOP], "a node of its own with 1 CPU, and no node has it"),
        (
            ["learner.num_nodes=2", "learner.ranks_per_node=4", "actor.placement=apart"],
            [HEAD, GPU],
            "actor needs a node with 1 CPU, 1 GPU, and no node has it beside the learner",
        ),
        (["learner.num_ranks=8"], [HEAD, GPU], "learner needs a node with 1 CPU, 8 GPU on the"),
        (["learner.device=cuda"], [LAPTOP], "has it (127.0.0.1: 4 CPU, 0 GPU); start run.py on"),
        (["learner.device=cuda:1"], [HEAD], "Ray chooses the GPUs"),
        (["actor.tensor_parallel_size=8"], [HEAD, GPU], "10.0.0.2: 8 CPU, 4 GPU, kind=h100"),
        (["ray.actor_labels=[kind=a100]"], [HEAD, GPU], "actor needs a node with 1 CPU and kind"),
        (["actor.placement=apart", "learner.num_ranks=4"], [HEAD], "10.0.0.1: 7 CPU, 0 GPU"),
        (["ray.envhub_cpus=32"], [HEAD, CPU], "envhub needs a node with 32 CPU"),
        (["ray.learner_cpus=32"], [LAPTOP], "lower ray.learner_cpus"),
    ],
)
def test_unsatisfiable_placement_is_refused_with_cluster_resources(
    overrides: list[str], nodes: list[ClusterNode], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        place(config(*overrides), nodes)


@pytest.mark.parametrize(
    ("label", "num"),
    [("kind=h100", 4), ("kind=!cpu", 7), ("kind=in(a100, h100)", 4), ("kind=!in(h100,cpu)", 3)],
)
def test_labels_select_nodes_as_ray_does(label: str, num: int) -> None:
    cfg = config("actor.num_actors=99", f'ray.actor_labels=["{label}"]')
    assert place(cfg, [HEAD, GPU, CPU]).num_fitting == num


@pytest.mark.parametrize("override", ["ray.address=here", "ray.actor_labels=[h100]"])
def test_malformed_address_and_labels_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT|key=value"):
        config(override)
