"""Laws of continued runs: the items stay the ones with which the run began."""

from pathlib import Path

from common.wire.messages import HubPlace
from envhub.catalogue.content import changed_content, contents_of, digests_of, record_content
from envhub.catalogue.registry import Registry
from envhub.main import first_hello
from tests.envhub.envs.dataset.made import GSM8K, make


def test_changed_dataset_is_refused_when_a_run_continues(tmp_path: Path) -> None:
    before = contents_of(Registry(["dataset"], make(tmp_path)))
    assert changed_content(tmp_path, before) == []
    record_content(tmp_path, before)
    assert changed_content(tmp_path, before) == []
    after = contents_of(Registry(["dataset"], make(tmp_path, GSM8K[:2])))
    (line,) = changed_content(tmp_path, after)
    assert line.startswith("dataset: data.train changed since the run began (sha256 ")
    assert line.endswith("restore it, or begin another run with run.name=NAME")
    record_content(tmp_path, after)
    assert changed_content(tmp_path, before) == []


def test_environments_without_files_have_no_content() -> None:
    assert contents_of(Registry(["recall"])) == {}


def test_hubs_have_equal_digests_only_with_equal_files(tmp_path: Path) -> None:
    here, there, other = (tmp_path / name for name in ("here", "there", "other"))
    for each in (here, there, other):
        each.mkdir()
    registry = Registry(["dataset", "recall"], make(here))
    digests = digests_of(contents_of(registry))
    assert digests.keys() == {"dataset"}
    place = HubPlace(url="http://h:1", token="t", envs=["dataset", "recall"])
    assert first_hello("hub", place, registry).content == digests
    assert digests_of(contents_of(Registry(["dataset"], make(there)))) == digests
    assert digests_of(contents_of(Registry(["dataset"], make(other, GSM8K[:2])))) != digests


def test_commit_of_a_source_does_not_change_the_digest_of_a_hub() -> None:
    files = {"data.train": "a"}
    assert digests_of({"dataset": {**files, "revision of data.train": "1f"}}) == digests_of(
        {"dataset": files}
    )
