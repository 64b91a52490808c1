"""Run before AgentGym's SearchQA server starts: small stand-ins for its index and its encoder.

Its questions are read from PARITY_QUERIES, and searches go to PARITY_RETRIEVER, where they would
take wiki-18's index of 60 GB and a GPU. Everything else of the server is its own.
"""

import json
import logging
import os
import sys
import types
import urllib.request


def load_dataset(kind, *, data_files, **_):
    """Return the questions of a file by its name."""
    split = os.path.basename(data_files).partition(".")[0]
    with open(os.environ["PARITY_QUERIES"], encoding="utf-8") as file:
        rows = json.load(file)[split]
    return {"train": {int(number): row for number, row in rows.items()}}


class Asking:
    """Asks the retriever that the other server asks."""

    def search(self, query, num, return_score):
        """Return documents and scores."""
        asked = json.dumps({"queries": query, "topk": num, "return_scores": True}).encode()
        with urllib.request.urlopen(os.environ["PARITY_RETRIEVER"], asked) as answer:
            (result,) = json.load(answer)["result"]
        return [each["document"] for each in result], [each["score"] for each in result]


def stand_in(name, **members):
    """Put a module of these members where an import of `name` finds it."""
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


logging.disable(logging.INFO)  # The library logs every search.
stand_in("datasets", load_dataset=load_dataset)
stand_in("transformers", AutoConfig=None, AutoModel=None, AutoTokenizer=None)
stand_in("agentenv_searchqa.retriever", get_retriever=lambda _: Asking())
