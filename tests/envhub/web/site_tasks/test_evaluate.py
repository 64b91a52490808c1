"""WebArena's three kinds of check."""

import pytest

from envhub.web.site_tasks.checks import (
    answer_matches,
    contents_match,
    reddit_post_url,
    unsupported,
    url_matches,
)


@pytest.mark.parametrize(
    ("references", "answer", "ok"),
    [
        ({"exact_match": "Quest Lumaflex"}, " 'quest lumaflex' ", True),
        ({"exact_match": "Quest Lumaflex"}, "Quest Lumaflex Band", False),
        ({"must_include": ["Ana", "Bob"]}, "it was ana, and BOB", True),
        ({"must_include": ["Ana", "Bob"]}, "it was Ana", False),
        ({"must_include": ["0"]}, "10 orders", False),
        ({"must_include": ["0"]}, "0 orders", True),
        ({"must_include": ["1", "2"]}, "12", True),
        ({"fuzzy_match": ["driving: 2min", "walking: 16min"]},
         "It takes 2 minutes driving and 16 mins walking", True),
        ({"fuzzy_match": ["driving: 2min"]}, "driving takes 20 min", False),
        ({"fuzzy_match": ["$6560.69 total spend"]}, "total spend is $6,560.69", True),
        ({"fuzzy_match": "N/A"}, "N/A", True),
        ({"fuzzy_match": "N/A"}, "no such thing", False),
        ({"must_include": ["Hyatt"], "fuzzy_match": ["15min"]}, "Hyatt, 15 min", True),
        ({"must_include": ["Hyatt"], "fuzzy_match": ["15min"]}, "Hilton, 15 min", False),
    ],
)  # fmt: skip
def test_answer_matches_all_references(references, answer, ok):
    assert answer_matches(references, answer) is ok


def test_answer_matches_refuses_an_unknown_comparison():
    with pytest.raises(ValueError, match="telepathy"):
        answer_matches({"telepathy": "x"}, "x")


@pytest.mark.parametrize(
    ("reference", "url", "ok"),
    [
        ("http://a.test/x", "http://a.test/x/", True),
        ("http://a.test/x", "http://a.test/x/y?z=1", True),
        ("http://a.test/x", "http://b.test/x", False),
        ("http://a.test/x?s=1", "http://a.test/x?t=2&s=1", True),
        ("http://a.test/x?s=1", "http://a.test/x?s=2", False),
        ("http://a.test/x?s=1", "http://a.test/x", False),
        ("http://a.test/x?s=1", "http://a.test/x?s=10", False),
        ("http://a.test/x/?s=1", "http://a.test/x?s=1", True),
        ("http://a.test/x |OR| http://a.test/y", "http://a.test/y", True),
        ("http://a.test/x?n=1 |OR| http://a.test/x?n=2", "http://a.test/x?n=2", True),
    ],
)
def test_url_matches_host_path_and_query(reference, url, ok):
    assert url_matches(reference, url) is ok


@pytest.mark.parametrize(
    ("required", "text", "ok"),
    [
        ({"exact_match": "20"}, "20", True),
        ({"exact_match": "20"}, "200", False),
        ({"must_include": ["a & b"]}, "x A &amp; B y", True),
        ({"must_include": ["yes |OR| sure", "x"]}, "sure, x", True),
        ({"must_include": ["yes |OR| sure", "x"]}, "no, x", False),
    ],
)
def test_contents_match_the_required_text(required, text, ok):
    assert contents_match(required, text) is ok


def test_reddit_post_url_ends_at_the_post():
    url = "http://r.test/f/books/124/a-title/-/comment/7?x=1"
    assert reddit_post_url(url) == "http://r.test/f/books/124/"
    assert reddit_post_url("http://r.test/f/books") == "http://r.test/f/books"


def test_unsupported_names_the_function_we_lack():
    known = {"url": "func:reddit_get_post_url('__last_url__')", "locator": ""}
    other = {"url": "last", "locator": "func:read_minds(__page__)"}
    assert unsupported({"program_html": [known]}) == ""
    assert unsupported({"program_html": [known, other]}) == "read_minds"
