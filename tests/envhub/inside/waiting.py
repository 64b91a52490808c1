"""The environment `waiting` as one of the registry's modules."""

from tests.envhub.outside import make_task as make_spec

__all__ = ["make_spec"]
