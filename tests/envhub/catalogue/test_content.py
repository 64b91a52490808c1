"""Laws of continued runs: the items stay the ones with which the run began."""

from pathlib import Path

from envhub.catalogue.content import changed_content, contents_of, record_content
from envhub.catalogue.registry import Registry
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
