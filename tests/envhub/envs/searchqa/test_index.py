"""Laws of the built-in retriever: results, their order and the build of its index."""

import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envhub.env import EnvFailure, Style
from envhub.envs.searchqa.index import (
    Bm25,
    FileRetriever,
    MemoryRetriever,
    Words,
    build_index,
    make_bm25,
)
from envhub.envs.searchqa.passages import Passage, make_passage, worded

FRUIT = [Passage("Apple", "apple pie"), Passage("Pear", "pear apple tart"), Passage("Plum", "plum")]


def write_corpus(path: Path, passages: Sequence[Passage]) -> Path:
    rows = [{"id": str(n), "contents": f"{p.title}\n{p.text}"} for n, p in enumerate(passages)]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def bm25_of(passages: Sequence[Passage]) -> Bm25:
    words = Words()
    return Bm25(make_bm25((f"{p.title}\n{p.text}" for p in passages), words), words)


def test_scores_are_those_computed_by_hand() -> None:
    # "apple" is in 2 of 3 passages; they have 3 and 4 words, 3 on average; k1 = 1.5, b = 0.75.
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    first = idf * 2 / (2 + 1.5 * (0.25 + 0.75 * 3 / 3))
    second = idf * 1 / (1 + 1.5 * (0.25 + 0.75 * 4 / 3))
    found = bm25_of(FRUIT).find("apples", 3)
    assert [number for number, _ in found] == [0, 1]
    assert [score for _, score in found] == pytest.approx([first, second], rel=1e-6)


def test_equal_scores_keep_order_of_corpus() -> None:
    same = [Passage("Fig", f"fig number{n}") for n in range(20)]
    assert [number for number, _ in bm25_of(same).find("fig", 5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("query", ["", "the of and", "zebra", "?!", "a"])
def test_search_for_unknown_words_finds_nothing(query: str) -> None:
    assert MemoryRetriever(FRUIT).search(query, 3) == []


def test_search_omits_passages_without_query_word() -> None:
    assert MemoryRetriever(FRUIT).search("plum", 3) == [FRUIT[2]]


def test_search_returns_at_most_all_passages() -> None:
    assert len(MemoryRetriever(FRUIT).search("apple plum", 99)) == 3


def test_file_is_searched_as_memory_is(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "fruit.jsonl", FRUIT)
    retriever = FileRetriever(corpus, tmp_path / "index")
    for query in ("apple", "pear tart", "plum apple", "nothing"):
        assert retriever.search(query, 3) == MemoryRetriever(FRUIT).search(query, 3)


def test_index_is_built_once_for_each_corpus_version(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "fruit.jsonl", FRUIT)
    folder = tmp_path / "index"
    first = build_index(corpus, folder)
    made_ns = first.stat().st_mtime_ns
    assert build_index(corpus, folder) == first
    assert first.stat().st_mtime_ns == made_ns
    write_corpus(corpus, [*FRUIT, Passage("Kiwi", "kiwi")])
    assert FileRetriever(corpus, folder).search("kiwi", 1) == [Passage("Kiwi", "kiwi")]
    assert not first.exists()


def test_index_is_rebuilt_when_only_the_mtime_differs(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "fruit.jsonl", FRUIT)
    first = build_index(corpus, tmp_path / "index")
    os.utime(corpus, ns=(1, 1))
    assert build_index(corpus, tmp_path / "index") != first


def test_build_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "fruit.jsonl", FRUIT)
    with open(corpus, "a", encoding="utf-8") as file:
        file.write('{"id": "3"}\n')
    with pytest.raises(EnvFailure, match=r"passage 4, byte [0-9]+: a passage must have"):
        build_index(corpus, tmp_path / "index")
    assert list((tmp_path / "index").iterdir()) == []


def test_half_built_index_is_never_used(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "fruit.jsonl", FRUIT)
    partial = tmp_path / "index" / "fruit.partial-killed"
    partial.mkdir(parents=True)
    os.utime(partial, (1, 1))  # left long ago
    assert FileRetriever(corpus, tmp_path / "index").search("plum", 1) == [FRUIT[2]]
    assert not partial.exists()


def test_missing_corpus_raises_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(EnvFailure, match=r"corpus .*none\.jsonl cannot be indexed"):
        FileRetriever(tmp_path / "none.jsonl", tmp_path / "index")


def test_corpus_truncated_while_open_raises(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "fruit.jsonl", FRUIT)
    retriever = FileRetriever(corpus, tmp_path / "index")
    corpus.write_text("", encoding="utf-8")
    with pytest.raises(EnvFailure, match="shorter"):
        retriever.search("plum", 1)


def test_concurrent_searches_equal_sequential_ones() -> None:
    passages = [
        Passage(f"Thing{n}", f"word{n % 7} word{n % 11} running apples") for n in range(300)
    ]
    retriever = MemoryRetriever(passages)
    queries = [f"word{n % 7} apples word{n % 11} thing{n}" for n in range(400)]
    alone = [retriever.search(query, 3) for query in queries]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda query: retriever.search(query, 3), queries))
    assert together == alone


@pytest.mark.parametrize(
    "row",
    [
        {"id": "1", "contents": "Apple\napple\npie"},
        {"id": 1, "title": "Apple", "text": "apple\npie"},
    ],
)
def test_passage_is_read_from_either_form(row: dict[str, object]) -> None:
    assert make_passage(row) == Passage("Apple", "apple\npie")


def test_passages_follow_wording_of_protocol() -> None:
    agentgym = worded(FRUIT[:2], Style.AGENTGYM)
    assert agentgym == (
        "<information>Doc 1(Title: Apple) apple pie\n"
        "Doc 2(Title: Pear) pear apple tart</information>"
    )
    compact = worded(FRUIT[:2], Style.COMPACT)
    assert compact == "<information>Apple: apple pie\nPear: pear apple tart</information>"
    assert worded([], Style.COMPACT) == "<information>No results.</information>"
