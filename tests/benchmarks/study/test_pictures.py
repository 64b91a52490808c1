"""Laws of the pictures of studies: a line with a band for every arm."""

import re
import xml.etree.ElementTree as ElementTree

from benchmarks.study.pictures import pictures_of
from tests.benchmarks.study.builders import RUNS
from tests.benchmarks.study.test_tables import LAGGED


def groups_of(svg: str) -> list[str]:
    return [each.get("id", "") for each in ElementTree.fromstring(svg).iter()]


def test_picture_has_a_line_per_arm() -> None:
    pictures = pictures_of("horizon", RUNS)
    assert sorted(pictures) == ["distance", "episodes", "seconds", "tokens"]
    for svg in pictures.values():
        assert {"line-short", "line-long", "band-short", "band-long"} <= set(groups_of(svg))
        assert ">short</text>" in svg
        assert re.search(r"\bnan\b", svg) is None


def test_every_rate_has_a_picture_of_all_corrections() -> None:
    pictures = pictures_of("staleness", LAGGED)
    assert sorted(pictures) == ["lag-1x-on", "lag-3x-on"]
    assert {"line-default", "line-none"} <= set(groups_of(pictures["lag-1x-on"]))
