"""Laws of the installed package: it holds all files of a run, and works in any folder."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from common.repository import ROOT

PACKAGES = ("actor", "common", "configs", "envhub", "learner", "scheduler", "tools")
TIMEOUT_S = 200.0


def tracked(*folders: str) -> list[str]:
    """Return the files of the repository below these folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *folders]
    return subprocess.check_output(command, encoding="utf-8").strip("\0").split("\0")


def contents(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the tracked files, because a build writes beside them."""
    source = tmp_path_factory.mktemp("source")
    names = tracked(
        *PACKAGES, "docs/examples", "longstride.py", "run.py", "pyproject.toml", "LICENSE"
    )
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def script(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment that also sees this one's packages."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    ours = sysconfig.get_path("purelib")
    (packages / "ours.pth").write_text(ours, encoding="utf-8")
    options = ["--no-deps", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run([*command, *options, str(wheel)], check=True, timeout=TIMEOUT_S)
    return folder / "bin" / "longstride"


def output_of(script: Path, *words: str, folder: Path) -> str:
    """Return the output of a command that succeeds."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(script), *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_wheel_has_each_file_of_the_packages(wheel: Path) -> None:
    missing = {*tracked(*PACKAGES), "longstride.py", "run.py"} - contents(wheel)
    assert missing == set()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Clone the repository, with this tree's files that make a release, and one change."""
    folder = tmp_path / "release" / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    for name in (".ci/release", "pyproject.toml"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    changes = "# Changelog\n\n## [Unreleased]\n- New.\n"
    (folder / "CHANGELOG.md").write_text(changes, encoding="utf-8")
    commit = ["git", "-C", str(folder), "commit", "-qam", "tree", "--allow-empty"]
    subprocess.run(commit, env=environment_of(folder), check=True)
    return folder


def environment_of(clone: Path, *, build_exit: int = 0) -> dict[str, str]:
    """Return the environment of a release, whose docker fails and whose podman notes its words.

    Args:
        build_exit: exit code of podman when it builds an image.
    """
    tools = clone.parent / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "docker").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    note = f'echo "$PWD" "$@" >> {tools}/words\n[ "$1" = info ] || exit {build_exit}\n'
    (tools / "podman").write_text(f"#!/bin/sh\n{note}", encoding="utf-8")
    for program in ("docker", "podman"):
        (tools / program).chmod(0o755)
    names = {
        f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    return {**os.environ, **names, "PATH": f"{tools}:/usr/bin:/bin"}


def release(clone: Path, *words: str, build_exit: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command of `make release` in a clone."""
    return subprocess.run(
        [sys.executable, str(clone / ".ci" / "release"), *words],
        env=environment_of(clone, build_exit=build_exit),
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
    )


def git(clone: Path, *words: str) -> str:
    """Return the output of git in a clone."""
    return subprocess.check_output(["git", "-C", str(clone), *words], encoding="utf-8")


@pytest.mark.slow
@pytest.mark.long
def test_release_refuses_a_changed_tree_by_the_names_of_its_files(clone: Path) -> None:
    (clone / "run.py").write_text("", encoding="utf-8")
    done = release(clone, "7.8.9")
    assert done.returncode == 1
    assert done.stderr == "the tree has changes that are not committed:\n M run.py\n"
    assert git(clone, "tag") == ""
    assert release(clone, "7.8").stderr.startswith("usage: make release VERSION=")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("unreleased", "problem"),
    [
        ("", "the section of this release is missing: ## [Unreleased]"),
        (
            "## [Unreleased]\n### Learning\n\n",
            "the section [Unreleased] is empty; list the changes there",
        ),
    ],
)
def test_release_without_changes_is_refused(clone: Path, unreleased: str, problem: str) -> None:
    text = f"# Changelog\n\n{unreleased}## [0.0.1] - 2026-01-01\n- Old.\n"
    (clone / "CHANGELOG.md").write_text(text, encoding="utf-8")
    commit = ["git", "-C", str(clone), "commit", "-qam", "released"]
    subprocess.run(commit, env=environment_of(clone), check=True)
    done = release(clone, "7.8.9")
    assert done.returncode == 1
    assert done.stderr == f"CHANGELOG.md: {problem}\n"


@pytest.mark.slow
@pytest.mark.long
def test_release_names_the_command_of_each_image_that_failed(clone: Path) -> None:
    done = release(clone, "7.8.8", build_exit=1)
    assert done.returncode == 1
    assert git(clone, "tag").split() == ["v7.8.8"]
    build = "podman build --target {0} --tag longstride:7.8.8-{0} ."
    assert done.stderr.splitlines()[-2:] == [build.format("cpu"), build.format("cuda")]


@pytest.mark.slow
@pytest.mark.long
def test_release_that_cannot_be_built_leaves_the_tree_as_it_was(clone: Path) -> None:
    (clone / "pyproject.toml").write_text('version = "0.1.0"\n[project]\n', encoding="utf-8")
    commit = ["git", "-C", str(clone), "commit", "-qam", "broken"]
    subprocess.run(commit, env=environment_of(clone), check=True)
    done = release(clone, "7.8.9")
    assert done.returncode == 1
    assert git(clone, "status", "--porcelain", "--untracked-files=no") == ""
    assert git(clone, "tag") == ""


@pytest.mark.slow
@pytest.mark.long
def test_release_has_its_version_in_tag_changelog_packages_and_images(
    wheel: Path, clone: Path, tmp_path: Path
) -> None:
    leftover = clone / "build" / "lib" / "actor" / "removed.py"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("", encoding="utf-8")
    done = release(clone, "7.8.9", "--build-arg", "BASE=mirror/debian:12")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    changes = (clone / "CHANGELOG.md").read_text(encoding="utf-8")
    assert changes.startswith("# Changelog\n\n## [Unreleased]\n\n## [7.8.9] - 20")
    assert changes.endswith("\n- New.\n")
    assert git(clone, "tag").split() == ["v7.8.9"]
    assert git(clone, "status", "--porcelain") == ""
    source = clone / "dist" / "longstride-7.8.9.tar.gz"
    with tarfile.open(source) as archive:
        folders = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert "configs" in folders
    assert "tests" not in folders, "setuptools adds some tests, and not their helpers"
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    of_tree = {name for name in contents(wheel) if "dist-info" not in name}
    of_release = contents(clone / "dist" / "longstride-7.8.9-py3-none-any.whl")
    assert of_tree <= of_release
    assert "actor/removed.py" not in of_release
    assert of_tree <= contents(tmp_path / "longstride-7.8.9-py3-none-any.whl")
    noted = (clone.parent / "tools" / "words").read_text(encoding="utf-8").splitlines()
    places, words = zip(*(line.split(" ", 1) for line in noted), strict=True)
    build = "build --build-arg BASE=mirror/debian:12 --target {0} --tag longstride:7.8.9-{0} ."
    assert words == ("info", build.format("cpu"), build.format("cuda"))
    assert str(clone) not in places, "leftovers of a checkout would be in the image"


@pytest.mark.slow
def test_installed_command_works_in_any_folder(script: Path, tmp_path: Path) -> None:
    version = output_of(script, "--version", folder=tmp_path)
    assert version.startswith("longstride ")
    assert "git" not in version
    dry = output_of(script, "--dry-run", folder=tmp_path)
    shipped = script.parents[1].resolve()
    path = next(line for line in dry.splitlines() if line.startswith("  path: "))
    assert path.partition(": ")[2].startswith(str(shipped))
    problems = next(line for line in dry.splitlines() if line.endswith("code/train.jsonl"))
    assert Path(problems.partition(": ")[2]).is_file(), "a default has the folder, too"
    for words in (["--help"], ["help", "learner.lr"], ["help"], ["show", "--help"]):
        text = output_of(script, *words, folder=tmp_path)
        assert "run.py" not in text
    assert "usage: longstride show" in text
    usage = output_of(script, "--help", folder=tmp_path)
    assert f"Relative paths start at {tmp_path}.\n" in usage
    steps = output_of(script, "new-env", "mine", folder=tmp_path)
    assert "\nlongstride check-env environments/mine.py:make_spec" in steps
    for suffix in (".py", ".yaml"):
        text = (tmp_path / "environments" / f"mine{suffix}").read_text(encoding="utf-8")
        assert "longstride " in text
        assert "run.py" not in text


@pytest.mark.slow
def test_missing_package_of_an_environment_names_the_extra(script: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['bm25s'] = None\n"
        "sys.argv[1:] = ['envs', 'env=searchqa']\n"
        "import run\n"
        "run.run()"
    )
    text = output_of(script.with_name("python"), "-c", code, folder=tmp_path)
    assert "PyStemmer: `pip install 'longstride[envs]'`" in text
    assert "make setup" not in text


@pytest.mark.slow
def test_module_is_the_console_script(script: Path, tmp_path: Path) -> None:
    python = script.with_name("python")
    text = output_of(python, "-m", "longstride", "show", "--help", folder=tmp_path)
    assert text == output_of(script, "show", "--help", folder=tmp_path)


@pytest.mark.slow
def test_installed_package_is_imported_in_any_folder(script: Path, tmp_path: Path) -> None:
    code = (
        "import longstride\n"
        "try: longstride.train('smoke', {'nothing': 1})\n"
        "except longstride.ConfigError as error: print(error)"
    )
    text = output_of(script.with_name("python"), "-c", code, folder=tmp_path)
    assert text.startswith("nothing=1: no such key")
    assert "`longstride help`" in text


@pytest.mark.slow
@pytest.mark.long
def test_installed_command_trains_below_its_folder(script: Path, tmp_path: Path) -> None:
    output_of(script, "--config", "smoke", "run.name=installed", folder=tmp_path)
    assert (tmp_path / "runs" / "installed" / "finished.json").is_file()
    assert list(script.parents[1].glob("lib/*/site-packages/runs")) == []
