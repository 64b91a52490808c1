"""The environment `shadowed` as one of the registry's modules."""

from tests.envhub.outside import make_shadowed as make_spec

__all__ = ["make_spec"]
