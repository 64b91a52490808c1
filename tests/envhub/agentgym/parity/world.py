"""What both servers are given alike: recipe files and a folder of BIRD's shape."""

import json
import sqlite3
from pathlib import Path

HERE = Path(__file__).parent
RANGES = {"train": 0, "dev": 9428}  # first data index of a split of BIRD
DESIGN = {
    "db_id": "shop",
    "table_names_original": ["item", "sale"],
    "table_names": ["item", "sale"],
    "column_names_original": [
        [-1, "*"], [0, "id"], [0, "Name"], [0, "price"], [1, "id"], [1, "item_id"], [1, "number"]
    ],
    "column_names": [
        [-1, "*"], [0, "id"], [0, "Name"], [0, "price"], [1, "id"], [1, "item id"], [1, "number"]
    ],
    "column_types": ["text", "number", "text", "number", "number", "number", "number"],
    "primary_keys": [1, 4],
    "foreign_keys": [[5, 1]],
}  # fmt: skip
QUESTIONS = [
    ("How many items are there?", "SELECT COUNT(*) FROM item"),
    ("Name the items above 5.", "SELECT Name FROM item WHERE price > 5"),
    ("How many of each item were sold?",
     "SELECT i.Name, SUM(s.number) FROM item i JOIN sale s ON s.item_id = i.id GROUP BY i.Name"),
    ("Which is the dearest?", "SELECT Name FROM item ORDER BY price DESC LIMIT 1"),
    ("What was never sold?", "SELECT Name FROM item WHERE id NOT IN (SELECT item_id FROM sale)"),
    ("List all sales.", "SELECT * FROM sale"),
]  # fmt: skip
OTHERS = [  # statements that a model may write: wrong, unordered, doubled, broken
    "SELECT Name FROM item",
    "SELECT Name, Name FROM item WHERE price > 5",
    "SELECT Name FROM item WHERE price > 5 ORDER BY Name DESC",
    "SELECT Name FROM item WHERE price > 5 UNION ALL SELECT Name FROM item WHERE price > 5",
    "SELECT nothing FROM item",
    "SELEC",
    "",
    "PRAGMA table_info(item)",
    "SELECT * FROM sale, item",
]


def write_recipes(folder: Path) -> Path:
    """Write the recipe files, the last name first."""
    folder.mkdir(parents=True, exist_ok=True)
    recipes = json.loads((HERE / "recipes.json").read_text(encoding="utf-8"))
    for name in sorted(recipes, reverse=True):
        (folder / f"{name}.json").write_text(json.dumps(recipes[name]), encoding="utf-8")
    return folder


def write_bird(folder: Path) -> Path:
    """Write a folder of BIRD's shape with one small database in both splits."""
    for split in RANGES:
        databases = folder / split / f"{split}_databases" / "shop"
        databases.mkdir(parents=True)
        _fill(databases / "shop.sqlite")
        entries = [
            {"db_id": "shop", "question": asked, "evidence": "", "SQL": gold, "question_id": i}
            for i, (asked, gold) in enumerate(QUESTIONS)
        ]
        (folder / split / f"{split}.json").write_text(json.dumps(entries), encoding="utf-8")
        (folder / split / f"{split}_tables.json").write_text(json.dumps([DESIGN]), encoding="utf-8")
    return folder


def _fill(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE item (id INTEGER PRIMARY KEY, Name TEXT, price REAL);"
        "CREATE TABLE sale (id INTEGER PRIMARY KEY, item_id INTEGER REFERENCES item(id),"
        " number INTEGER);"
    )
    names = ["tea", "cup", "pot", "tray", "spoon", "sieve", "caddy"]
    connection.executemany(
        "INSERT INTO item VALUES (?, ?, ?)", [(i, name, 2.5 * i) for i, name in enumerate(names, 1)]
    )
    connection.executemany(
        "INSERT INTO sale VALUES (?, ?, ?)", [(i, 1 + i % 5, i % 4) for i in range(1, 41)]
    )
    connection.commit()
    connection.close()
