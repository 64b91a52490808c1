"""One engine in float32 for all files of this folder, which run in one worker."""

from collections.abc import Iterator

import pytest

from tests.actor.engine.engine_rig import ExactEngine, Rig, forked_engines


@pytest.fixture(scope="package")
def exact_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExactEngine]:
    with forked_engines():
        engine = ExactEngine(lambda: tmp_path_factory.mktemp("rig"))
        yield engine
        engine.end()


@pytest.fixture
def exact_rig(exact_engine: ExactEngine) -> Rig:
    return exact_engine.lend()
