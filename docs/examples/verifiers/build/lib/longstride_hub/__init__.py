"""The tasks of a Longstride hub as a taskset of verifiers: `vf-eval longstride-hub`."""

from longstride_hub.taskset import HubEnv, HubTaskset

__all__ = ["HubEnv", "HubTaskset"]
