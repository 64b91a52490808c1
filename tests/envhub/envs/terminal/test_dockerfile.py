"""Laws of Dockerfiles without a build: each instruction is performed as Docker does, or refused."""

import tarfile
from pathlib import Path

import pytest

from common.errors import ConfigError
from envhub.envs.terminal.image import (
    BUILDER,
    MACHINE,
    IgnoreRules,
    TaskImage,
    expand,
    pattern_of,
    read_image,
    read_instructions,
)
from envhub.sandbox.interface import PATH


def image_of(folder: Path, text: str, **files: str) -> TaskImage:
    """Return the image of a Dockerfile after `FROM x`; `__` stands for each slash of a name."""
    context = folder / "environment"
    contents = {"Dockerfile": text if "FROM" in text else f"FROM x\n{text}\n", **files}
    for name, content in contents.items():
        path = context / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return read_image(folder, "task", is_built=False)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$A/b", "one/b"),
        ("${A}b", "oneb"),
        ("$Ab", ""),
        ("$NONE", ""),
        ("${NONE:-x}", "x"),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY-x}", ""),
        ("${A:+x}", "x"),
        ("${EMPTY:+x}", ""),
        ("${EMPTY+x}", "x"),
        ("${NONE+x}", ""),
        ("${NONE:-$A/${B:-two}}", "one/two"),
        ('${NONE:-"a b"}', "a b"),
        ("${A:?needed}", "one"),
        ("'$A'", "$A"),
        ('"$A b"', "one b"),
        (r"\$A", "$A"),
        (r'"\$A\n\""', '$A\\n"'),
        (r"a\ b", "a b"),
        ("a'b c'\"d\"", "ab cd"),
        ("5$", "5$"),
        ("$(A)", "$(A)"),
    ],
)
def test_word_is_expanded_as_docker_does(word: str, value: str) -> None:
    assert expand(word, {"A": "one", "EMPTY": ""}) == value


@pytest.mark.parametrize(
    ("lines", "variables"),
    [
        ('ENV PATH="/opt/bin:$PATH"', {"PATH": f"/opt/bin:{PATH}"}),
        ("ENV A=1 B=2\nENV A=$B", {"A": "2", "B": "2"}),
        ("ENV A=old\nENV A=new B=$A", {"A": "new", "B": "old"}),
        ("ENV A one two", {"A": "one two"}),
        ("ENV A one B=2", {"A": "one B=2"}),
        ("env A='x y' B=\"$A\" C=z\\ w", {"A": "x y", "B": "", "C": "z w"}),
        ("ENV A=ab\\\ncd", {"A": "abcd"}),
        ("ENV A=1 \\\n  # a comment\n\n  B=2", {"A": "1", "B": "2"}),
        ("ARG V=3\nENV A=$V", {"A": "3"}),
        ("ARG V=3\nENV V=4\nENV A=$V", {"V": "4", "A": "4"}),
        ("ARG V\nENV A=${V:-5}", {"A": "5"}),
        ("ARG V=1\nFROM x:$V\nENV A=$V", {"A": ""}),
        ("ARG V=1\nFROM x:$V\nARG V\nENV A=$V", {"A": "1"}),
        ("ARG TARGETARCH\nENV A=$TARGETARCH", {"A": MACHINE}),
        ("# escape=`\nFROM x\nENV A=a\\b`\nc", {"A": "a\\bc"}),
        ("FROM x AS base\nENV A=1\nFROM y\nENV B=2", {"B": "2"}),
        ("FROM x AS base\nENV A=1\nFROM base\nENV B=$A", {"A": "1", "B": "1"}),
        ("FROM --platform=$BUILDPLATFORM x\nENV A=1", {"A": "1"}),
    ],
)
def test_variables_are_those_of_docker(
    tmp_path: Path, lines: str, variables: dict[str, str]
) -> None:
    assert image_of(tmp_path, lines).variables == variables


@pytest.mark.parametrize(
    ("lines", "folder", "work"),
    [
        ("", "/app", "/app"),
        ("WORKDIR /data", "/data", "/data"),
        ("WORKDIR /data\nWORKDIR in/../out", "/data", "/data/out"),
        ("ENV HERE=/opt/x\nWORKDIR ${HERE}/y", "/opt/x/y", "/opt/x/y"),
        ('WORKDIR "/my app"', "/my app", "/my app"),
        ("WORKDIR /app\nCOPY a /app/\nWORKDIR /app/src", "/app", "/app/src"),
    ],
)
def test_work_folder_is_that_of_docker(tmp_path: Path, lines: str, folder: str, work: str) -> None:
    image = image_of(tmp_path, lines, a="")
    assert (image.folder, image.work) == (folder, work)


@pytest.mark.parametrize(
    ("line", "targets"),
    [
        ("COPY a.txt .", ["/app/a.txt"]),
        ("COPY a.txt b.txt", ["/app/b.txt"]),
        ("COPY a.txt sub/", ["/app/sub/a.txt"]),
        ("COPY a.txt /app", ["/app/a.txt"]),
        ("COPY a.txt file.", ["/app/file."]),
        ("COPY *.txt /app/", ["/app/a.txt", "/app/b.txt"]),
        ("COPY [ab].t?t to/", ["/app/to/a.txt", "/app/to/b.txt"]),
        ("COPY [^a].txt .", ["/app/b.txt"]),
        ("COPY dir .", ["/app/.hidden", "/app/in/c.txt"]),
        ("COPY dir/* to/", ["/app/to/.hidden", "/app/to/c.txt"]),
        ("COPY dir a.txt to/", ["/app/to/.hidden", "/app/to/a.txt", "/app/to/in/c.txt"]),
        ("COPY /a.txt ../app/x", ["/app/x"]),
        ("COPY ../../a.txt .", ["/app/a.txt"]),
        ("ENV F=a.txt\nADD $F ${F}.new", ["/app/a.txt.new"]),
        ('COPY ["a.txt", "with space"]', ["/app/with space"]),
        ("COPY --chown=root --chmod=700 --link a.txt .", ["/app/a.txt"]),
    ],
)
def test_copied_files_are_those_of_docker(tmp_path: Path, line: str, targets: list[str]) -> None:
    files = {"a.txt": "", "b.txt": "", "dir__in__c.txt": "", "dir__.hidden": ""}
    image = image_of(tmp_path, f"WORKDIR /app\n{line}", **files)
    assert sorted(file.target for file in image.files) == sorted(targets)
    assert {file.mode for file in image.files} == {0o700 if "700" in line else 0o644}


def test_folder_of_the_dockerfile_is_copied_without_ignored_files(tmp_path: Path) -> None:
    files = {".dockerignore": "# secrets\n*.key\n**/cache\n!keep.key\nDockerfile\n"}
    names = ("a", "x.key", "keep.key", "sub__x.key", "sub__cache__y", "cache")
    image = image_of(tmp_path, "WORKDIR /app\nCOPY . .", **files, **dict.fromkeys(names, ""))
    targets = sorted(file.target for file in image.files)
    assert targets == ["/app/.dockerignore", "/app/a", "/app/keep.key", "/app/sub/x.key"]


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*", "a/b", False),
        ("**", "a/b", True),
        ("**/b", "b", True),
        ("a/**/c", "a/c", True),
        (r"\*", "*", True),
        ("a?c", "a/c", False),
        ("[^b]", "/", False),
    ],
)
def test_pattern_matches_within_a_folder(pattern: str, path: str, matches: bool) -> None:
    assert bool(pattern_of(pattern).fullmatch(path)) is matches


def test_last_rule_decides_what_is_ignored() -> None:
    rules = IgnoreRules("docs\n!docs/a.md\ndocs/a.md\n!docs/b.md")
    assert [rules.ignores(f"docs/{name}.md") for name in "abc"] == [True, False, True]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("RUN make", "it has RUN 'make', which only a container's build performs"),
        ("USER postgres", "USER 'postgres': commands run as the user agent"),
        ("USER root", "USER 'root': commands run as the user agent"),
        ('ENTRYPOINT ["/start.sh"]', "no program starts before the commands"),
        ("ENTRYPOINT /start.sh", "no program starts before the commands"),
        ("HEALTHCHECK CMD true", "HEALTHCHECK 'CMD true' is not supported"),
        ("VOLUME /data", "writes /data, which is outside of the work folder /app"),
        ("FETCH x", "FETCH 'x' is not supported"),
        ("COPY --from=build /a /app/", "--from is not supported"),
        ("COPY --parents a /app/", "--parents is not supported"),
        ("COPY --chmod=u+x a /app/", "--chmod must be three octal digits"),
        ("COPY <<EOF /app/x\nRUN\nEOF", "has a here-document"),
        ("COPY a", "has no target"),
        ("ADD https://x/y /app/", "downloads https://x/y"),
        ("ADD git@github.com:x/y /app/", "downloads git@github.com:x/y"),
        ("COPY a /etc/a", "writes /etc/a, which is outside"),
        ("WORKDIR /", "WORKDIR / is a folder of the system"),
        ("ENV A", "ENV 'A' has no value"),
        ("ENV A=1 B", "'B' is not NAME=VALUE"),
        ("ENV A=${B/x/y}", "changes $B in a way that is not supported"),
        ('ENV A="${B:?is needed}"', "needs $B: is needed"),
        ('ENV A="x', "has a quote without an end"),
        ("ENV A=${B", "changes $B in a way"),
        ("ENV A=1\nFROM x", "stands before FROM"),
        ("# FROM", "it has no FROM"),
    ],
)
def test_instruction_without_an_effect_here_is_refused(
    tmp_path: Path, lines: str, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        image_of(tmp_path, lines, a="")
    assert words in str(raised.value)
    assert str(raised.value).startswith("task: ")


def test_archive_that_docker_unpacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    with tarfile.open(tmp_path / "environment" / "a.tgz", "w:gz") as archive:
        archive.add(__file__, "x")
    with pytest.raises(ConfigError, match=r"unpacks the archive a\.tgz"):
        image_of(tmp_path, "WORKDIR /app\nADD a.tgz .")
    assert image_of(tmp_path, "WORKDIR /app\nCOPY a.tgz .").files[0].target == "/app/a.tgz"


def test_instructions_without_an_effect_on_commands_are_accepted(tmp_path: Path) -> None:
    lines = (
        'CMD ["bash"]\nEXPOSE 80\nLABEL a=b\nMAINTAINER me\nONBUILD RUN x\nSHELL ["bash", "-c"]\n'
        "STOPSIGNAL 9\nHEALTHCHECK NONE\nENTRYPOINT []\nUSER agent\nUSER 1000:1000"
    )
    assert image_of(tmp_path, lines) == TaskImage(
        folder="/app", work="/app", files=(), variables={}
    )


def test_lines_of_a_dockerfile_are_joined() -> None:
    text = "\ufeffFROM x\r\n  run a \\\r\n # no\r\n\\\n  b\nCMD c\\\\\nLABEL d=\\"
    words = [(each.word, each.text) for each in read_instructions(text)]
    assert words == [("FROM", "x"), ("RUN", "a   b"), ("CMD", "c\\\\"), ("LABEL", "d=")]


def test_builder_has_the_machine_of_both_sides() -> None:
    assert BUILDER["BUILDPLATFORM"] == BUILDER["TARGETPLATFORM"] == f"linux/{MACHINE}"
