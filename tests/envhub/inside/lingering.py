"""The environment `faulty`, allowed to be slow."""

from dataclasses import replace

from envhub.env import EnvSpec
from tests.envhub import outside


def make_spec() -> EnvSpec:
    return replace(outside.make_spec(), name="lingering")
