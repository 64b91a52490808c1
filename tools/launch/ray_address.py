"""The address of the Ray cluster that a run joins."""

import os

from common.config.ray import RaySection


def cluster_address(section: RaySection) -> str:
    """Return the address of the cluster to join; "" if the run starts its own cluster."""
    return section.address or os.environ.get("RAY_ADDRESS", "")
