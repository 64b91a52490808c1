"""The section `machine`: the target machine of a preset."""

from dataclasses import dataclass

from common.config.knobs import knob
from common.text import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSection:
    """The target machine of a preset, for the memory plan of a dry run without a GPU."""

    num_nodes: int = knob(1, "Sets the number of nodes. The first has the learner.", ge=1, le=1000)
    num_gpus: int = knob(
        0, "Sets the number of GPUs of each node. 0 plans for any machine.", ge=0, le=1000
    )
    gpu_memory_gib: float = knob(80.0, "Sets the memory of each GPU, in GiB.", gt=0, le=10_000)
    host_memory_gib: float = knob(
        1000.0, "Sets the host memory of each node, in GiB.", gt=0, le=10**6
    )

    @property
    def text(self) -> str:
        """The machine as text."""
        nodes = counted(self.num_nodes, "node")
        gpus = counted(self.num_gpus, "GPU")
        return f"{nodes} with {gpus} of {self.gpu_memory_gib:g} GiB"
