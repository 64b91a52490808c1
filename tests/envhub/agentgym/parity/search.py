"""SearchQA for both servers alike: questions, passages, and one small retriever that both ask."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.envhub.agentgym.parity.world import HERE

# First data index of each set of questions, and how AgentGym's server calls its file.
SETS = {
    "nq_test": (0, "test"),
    "triviaqa_test": (3610, "test"),
    "popqa_test": (14923, "test"),
    "hotpotqa_test": (29190, "test"),
    "2wiki_test": (36595, "test"),
    "musique_test": (49171, "test"),
    "bamboogle_test": (51588, "test"),
    "nq_train": (51713, "train"),
    "hotpotqa_train": (130881, "train"),
}
FIRST_OF_TRAIN = 51713
STAND_INS = HERE / "search_stand_ins.py"
ASKED = [
    ("where does the river Lenne rise?", ["the Kahler Asten", "Kahler Asten"]),
    ("who wrote The Tin Kettle?", ["A. B. Orm", "Anna Orm"]),
    ("how many arches has the Obra bridge?", ["7", "seven"]),
    ("is Obra older than Lenne?", ["yes"]),
    ("what is the capital of Varn?", ["Östhaven"]),
]
PASSAGES = [
    '"Lenne"\nThe Lenne is a river. It rises at the Kahler Asten and passes Obra.',
    '"Kahler Asten"\nKahler Asten is a mountain of 842 metres, the source of the river Lenne.',
    '"The Tin Kettle"\nThe Tin Kettle is a novel of 1921 that Anna Orm wrote in Obra.',
    '"Anna Orm"\nA. B. Orm (Anna Orm) wrote novels, among them "The Tin Kettle".',
    '"Obra"\nObra is a town on the Lenne, founded in 1203; yes, it is older than Lenne Abbey.',
    '"Obra bridge"\nThe bridge of Obra has seven arches.\nIts eighth fell in 1784.',
    '"Varn"\nVarn is an island; its capital is Östhaven.  Two spaces stand here.',
    "A title alone",
]
JUNK = (
    "",
    "I do not know.",
    "<answer>Paris</answer>",
    "<answer> the kahler asten! </answer> <answer>seven</answer>",
    "<think>seven</think>\n<answer>\nSeven.\n</answer>",
    "<answer>yes <search>Obra</search>",
    "<search>arches</search><answer>7</answer>",
    "<search></search>",
    "<SEARCH>Obra</SEARCH>",
    "<search>Obra",
    "<answer>Osthaven</answer>",
)


def indices() -> list[int]:
    """Return the data indices of the questions that are written."""
    return [first + i for first, _ in SETS.values() for i in range(len(ASKED))]


def write_questions(folder: Path) -> Path:
    """Write the files of questions that ours reads, and queries.json for AgentGym's."""
    folder.mkdir()
    queries: dict[str, dict[int, object]] = {"test": {}, "train": {}}
    for name, (first, split) in SETS.items():
        rows = [{"question": asked, "golden_answers": right} for asked, right in ASKED]
        lines = [json.dumps({"id": f"{name}_{i}", **row}) for i, row in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        begin = first - (FIRST_OF_TRAIN if split == "train" else 0)
        for i, (asked, right) in enumerate(ASKED):
            told = {"question": asked, "reward_model": {"ground_truth": {"target": right}}}
            queries[split][begin + i] = told
    (folder / "queries.json").write_text(json.dumps(queries), encoding="utf-8")
    return folder


def found(query: str, num: int) -> list[str]:
    """Return the passages that have most words of a query; of equal ones the first."""
    words = set(re.findall(r"\w+", query.lower()))
    scored = [-len(words & set(re.findall(r"\w+", each.lower()))) for each in PASSAGES]
    order = sorted(range(len(PASSAGES)), key=lambda i: (scored[i], i))
    return [PASSAGES[i] for i in order[:num]]


class Retriever(BaseHTTPRequestHandler):
    """Speaks as Search-R1's retrieval server."""

    def do_POST(self) -> None:
        """Answer a search."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = [
            [{"document": {"contents": each}, "score": 1.0} for each in found(query, asked["topk"])]
            for query in asked["queries"]
        ]
        body = json.dumps({"result": told}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def retriever() -> Iterator[str]:
    """Serve the passages; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
