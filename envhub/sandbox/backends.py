"""The choice of the sandbox by the configuration."""

from common.config.envs import SandboxOptions
from envhub.sandbox.bubblewrap import Bubblewrap
from envhub.sandbox.containers import Containers
from envhub.sandbox.engine import ENGINES
from envhub.sandbox.harbor import SCHEME, HarborSandboxes
from envhub.sandbox.interface import MIB, SandboxBackend, SandboxLimits
from envhub.sandbox.remote import RemoteSandboxes

SHARED_FACTOR = 4
MAKERS = {
    "bwrap": Bubblewrap,
    "docker": Containers,
    "podman": Containers,
    "remote": RemoteSandboxes,
}


def make_backend(options: SandboxOptions) -> SandboxBackend:
    """Return the backend of `envs.sandbox.backend`."""
    if options.backend.startswith(SCHEME):
        return HarborSandboxes(options)
    return MAKERS[options.backend](options)


def has_containers(options: SandboxOptions) -> bool:
    """Return whether the sandboxes build and run the containers of a task."""
    return options.backend in ENGINES or options.backend.startswith(SCHEME)


def limits_of(options: SandboxOptions) -> SandboxLimits:
    """Return the limits of the configuration."""
    return SandboxLimits(
        memory_bytes=options.memory_mib * MIB,
        processes=options.processes,
        open_files=options.open_files,
        max_files=options.max_files,
        file_bytes=options.file_mib * MIB,
        disk_bytes=options.disk_mib * MIB,
    )


def container_limits_of(options: SandboxOptions) -> SandboxLimits:
    """Return the limits of containers that are as their authors made them."""
    containers = options.containers
    return SandboxLimits(
        memory_bytes=containers.memory_mib * MIB,
        processes=containers.processes,
        open_files=options.open_files,
        max_files=containers.max_files,
        file_bytes=containers.disk_mib * MIB,
        disk_bytes=containers.disk_mib * MIB,
    )


def worker_bytes(options: SandboxOptions, num_sandboxes: int) -> int:
    """Return the memory limit of a worker process with its sandboxes, in bytes.

    The worker's measurement counts pages several times that processes share, so the limit is wide.
    Each sandbox has its own exact limit.
    """
    num_own = num_sandboxes if options.backend == "bwrap" else 0
    return (1024 + num_own * SHARED_FACTOR * (options.memory_mib + 3 * options.disk_mib)) * MIB
