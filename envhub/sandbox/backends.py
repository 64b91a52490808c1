"""The choice of the sandbox by the configuration."""

from common.config.sandbox.options import SandboxOptions
from envhub.sandbox.bubblewrap import Bubblewrap
from envhub.sandbox.containers import Containers
from envhub.sandbox.interface import MIB, SandboxBackend, SandboxLimits
from envhub.sandbox.remote import RemoteSandboxes

MAKERS = {
    "bwrap": Bubblewrap,
    "docker": Containers,
    "podman": Containers,
    "remote": RemoteSandboxes,
}


def make_backend(options: SandboxOptions) -> SandboxBackend:
    """Return the backend of `envs.sandbox.backend`."""
    return MAKERS[options.backend](options)


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


def worker_bytes(options: SandboxOptions, num_sandboxes: int) -> int:
    """Return the memory limit of a worker process with its sandboxes, in bytes."""
    is_own = options.backend == "bwrap"
    return (1024 + is_own * num_sandboxes * (options.memory_mib + 3 * options.disk_mib)) * MIB
