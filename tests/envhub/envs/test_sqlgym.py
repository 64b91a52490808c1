"""The SQL environment on generated databases and on a folder in BIRD's format."""

import json
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.config.envs import EnvsSection
from envhub.env import EnvFailure, EnvSpec, StepResult, Style, UnknownItem
from envhub.envs.sqlgym.env import check, make_spec
from envhub.envs.sqlgym.questions import questions
from tests.configs import edited
from tests.envhub.envs.playing import elsewhere, expert_results, item_of, new_episode

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"

PETS = {
    "db_id": "pets",
    "table_names_original": ["owner", "pet"],
    "table_names": ["owner", "pet"],
    "column_names_original": [
        [-1, "*"],
        [0, "id"],
        [0, "nm"],
        [1, "id"],
        [1, "owner_id"],
        [1, "n"],
    ],
    "column_names": [[-1, "*"], [0, "id"], [0, "name"], [1, "id"], [1, "owner id"], [1, "name"]],
    "column_types": ["text", "integer", "text", "integer", "integer", "text"],
    "primary_keys": [1, [3]],
    "foreign_keys": [[4, 1]],
}
CREATE_PETS = """
CREATE TABLE owner (id INTEGER PRIMARY KEY, nm TEXT);
CREATE TABLE pet (id INTEGER PRIMARY KEY, owner_id INTEGER REFERENCES owner (id), n TEXT);
INSERT INTO owner VALUES (1, 'Ann'), (2, 'Bob');
INSERT INTO pet VALUES (1, 1, 'Rex'), (2, 1, 'Tom'), (3, 2, 'Rex');
"""
ASKED = {
    "db_id": "pets",
    "question": "What are Ann's pets called?",
    "evidence": "Ann is an owner",
    "SQL": "SELECT n FROM pet JOIN owner ON owner.id = owner_id WHERE nm = 'Ann'",
}
BROKEN = {"db_id": "pets", "question": "?", "evidence": "", "SQL": "SELECT absent FROM pet"}
ASTRAY = {"db_id": "lost", "question": "?", "evidence": "", "SQL": "SELECT 1"}


@pytest.fixture(scope="module")
def spec() -> EnvSpec:
    return make_spec(edited(EnvsSection(), {"sqlgym.query_timeout_s": 0.2}))


@pytest.fixture
def bird_dir(tmp_path: Path) -> Path:
    for name, asked in (("train", [ASKED, BROKEN, ASTRAY]), ("dev", [ASKED])):
        database = tmp_path / name / f"{name}_databases" / "pets" / "pets.sqlite"
        database.parent.mkdir(parents=True)
        connection = sqlite3.connect(database)
        connection.executescript(CREATE_PETS)
        connection.close()
        (tmp_path / name / f"{name}.json").write_text(json.dumps(asked))
        (tmp_path / name / f"{name}_tables.json").write_text(json.dumps([PETS]))
    return tmp_path


def bird_spec(folder: Path) -> EnvSpec:
    return make_spec(edited(EnvsSection(), {"sqlgym.bird_dir": str(folder)}))


def answered(spec: EnvSpec, item_id: str, action: str, style: Style = Style.COMPACT) -> StepResult:
    """Return the result of one action, which always ends the episode."""
    env = new_episode(spec, style)
    env.reset(item_id, 0)
    try:
        return env.step(action)
    finally:
        env.close()


def played(spec: EnvSpec, item_id: str, style: Style) -> float:
    env = new_episode(spec, style)
    env.reset(item_id, 0)
    (result,) = expert_results(env)
    env.close()
    assert result.done
    assert result.is_valid
    return result.reward


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
def test_gold_statement_solves_every_item(spec, difficulty):
    sizes = spec.subsets[difficulty]
    items = [f"{difficulty}-train-{i}" for i in range(sizes.num_train)]
    items += [f"{difficulty}-test-{i}" for i in range(sizes.num_test)]
    assert sum(played(spec, item, Style.COMPACT) for item in items) == len(items)


def test_no_question_is_asked_twice_nor_in_both_splits():
    for difficulty in ("easy", "medium", "hard"):
        asked = [q.text for split in ("train", "test") for q in questions(difficulty, split)]
        assert len(set(asked)) == len(asked) == 300


def test_first_observation_tells_the_tables_and_the_question(spec):
    env = new_episode(spec)
    lines = env.reset("easy-train-0", 0).split("\n")
    env.close()
    assert lines[0] == "customers(id, name, city, segment, birth_year)"
    assert lines[2].startswith("orders(id, code, customer_id -> customers, product_id -> products")
    assert lines[3].startswith("question: How many ")


@pytest.mark.parametrize("style", list(Style))
@pytest.mark.parametrize(
    "action",
    [
        "SELECT COUNT(*) FROM teachers",
        "Thought: I count.\n\nAction: ```sql\nSELECT COUNT(*) FROM teachers;\n```",
        "```sql SELECT 1 ``` no: ```sql\nSELECT COUNT(*) FROM teachers\n``` Done.",
    ],
)
def test_statement_is_found_in_the_answer(spec, style, action):
    item_id = next(
        f"easy-train-{i}"
        for i, question in enumerate(questions("easy", "train"))
        if question.database.domain == "school"
    )
    result = answered(spec, item_id, action, style)
    assert (result.observation, result.done, result.is_valid) == ("[(24,)]", True, True)


def test_reward_compares_sets_of_rows(bird_dir):
    spec = bird_spec(bird_dir)
    rewards = {
        "SELECT 'Tom' UNION ALL SELECT 'Rex' UNION ALL SELECT 'Rex'": 1.0,
        "SELECT n FROM pet WHERE id < 3 ORDER BY n": 1.0,
        "SELECT n FROM pet WHERE id < 2": 0.0,
        "SELECT n, id FROM pet WHERE id < 3": 0.0,
        "SELECT upper(n) FROM pet WHERE id < 3": 0.0,
    }
    for statement, reward in rewards.items():
        assert answered(spec, "bird-train-0", statement).reward == reward, statement


@pytest.mark.parametrize(
    "statement",
    [
        "",
        "-- nothing",
        "nonsense",
        "SELECT 1; SELECT 2",
        "DROP TABLE pet",
        "INSERT INTO pet VALUES (9, 1, 'x')",
        "UPDATE pet SET n = 'x'",
        "DELETE FROM pet",
        "CREATE TABLE t (i)",
        "CREATE TEMP TRIGGER t AFTER INSERT ON pet BEGIN SELECT 1; END",
        "CREATE TEMP TABLE t AS SELECT 1; SELECT * FROM t",
        "INSERT INTO sqlite_master SELECT * FROM sqlite_master",
        "BEGIN",
        "VACUUM",
        "ANALYZE",
        "PRAGMA user_version = 5",
        "PRAGMA hard_heap_limit = 1",
        "PRAGMA Temp_Store_Directory = '/tmp'",
        "PRAGMA quick_check",
        "ATTACH DATABASE '/etc/passwd' AS p",
        "SELECT load_extension('x')",
        "SELECT writefile('x', 'y')",
        "SELECT readfile('/etc/passwd')",
        "SELECT zeroblob(2000000000)",
        "SELECT hex(zeroblob(190000))",
        "SELECT " + "(" * 2000 + "1" + ")" * 2000,
        "SELECT '" + "x" * 50_000 + "'",
        "SELECT '\0'",
        "SELECT '\ud800'",
    ],
)
def test_what_is_no_plain_reading_is_refused(bird_dir, statement):
    path = bird_dir / "train" / "train_databases" / "pets" / "pets.sqlite"
    before = path.read_bytes()
    result = answered(bird_spec(bird_dir), "bird-train-0", statement)
    assert result.observation.startswith("Error: ")
    assert (result.reward, result.done, result.is_valid) == (0.0, True, False)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["pets.sqlite"]


def test_agentgym_style_tells_an_error_bare():
    wrong = "SELECT * FROM nowhere"
    result = answered(make_spec(EnvsSection()), "easy-train-0", wrong, Style.AGENTGYM)
    assert result.observation == "no such table: nowhere"


@pytest.mark.parametrize(
    "statement",
    [
        ENDLESS,
        "SELECT printf('%.*c', 2000000000, 'x')",
        "SELECT format('%5.2000000000c', 'x')",
        "SELECT printf('%.*c', '2000000000', 'x')",
        "SELECT printf('%.*c', -2e9, 'x')",
        "SELECT printf(replace(hex(zeroblob(90000)), '000000', '%.199999c'), 'x')",
        "SELECT trim(replace(hex(zeroblob(90000)), '0', 'a'), "
        "replace(hex(zeroblob(90000)), '0', 'b') || 'a')",
        "SELECT rtrim(zeroblob(199999), replace(hex(zeroblob(90000)), '0', 'b') || x'00')",
        f"SELECT i FROM ({ENDLESS.replace('MAX(i)', 'i')} LIMIT 3000000) ORDER BY -i",
        "SELECT " + ", ".join(["hex(zeroblob(99000))"] * 1200),
        "SELECT " + ", ".join(["hex(zeroblob(99000))"] * 399),
        "SELECT instr(zeroblob(199999), zeroblob(99999) || x'01')",
        "SELECT replace(hex(zeroblob(90000)), '0', 'a') LIKE '%a%a%a%a%a%a%a%a%b'",
        f"SELECT * FROM ({ENDLESS}) ORDER BY 1",
        f"CREATE TEMP TABLE t AS {ENDLESS.replace('MAX(i)', 'hex(zeroblob(9000))')}",
    ],
)
def test_costly_statement_ends_soon(spec, statement):
    began_s = time.thread_time()
    result = answered(spec, "easy-test-0", statement)
    assert time.thread_time() - began_s < 1.5
    assert result.reward == 0.0


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT printf('%05.1f|%s|%d%%', 2.25, 'a', 3)",
        "SELECT printf('%.3c%5d', 'xy', 7), format('%s', NULL)",
        "SELECT printf('%.*c', 3, 'x'), printf('%.*c', 'a'), printf(NULL)",
        "SELECT trim('xyaxy', 'xy'), ltrim('aab', 'a'), rtrim('baa', 'a')",
        "SELECT trim('  a '), trim('a', NULL), trim(121, 1), trim('a', ''), trim(x'6162', 'b')",
    ],
)
def test_bounded_functions_return_what_sqlite_does(spec, statement):
    plain = sqlite3.connect(":memory:")
    expected = str(plain.execute(statement).fetchall())
    plain.close()
    assert answered(spec, "easy-test-0", statement).observation == expected


def test_result_beyond_its_bytes_is_refused(spec):
    wide = f"WITH n(i) AS (VALUES {', '.join(f'({i})' for i in range(200))}) "
    result = answered(spec, "easy-test-0", wide + "SELECT hex(zeroblob(99000)) || i FROM n")
    assert result.observation == f"Error: more than {16 << 20} bytes"


def test_endless_statement_is_told_its_time_limit(spec):
    result = answered(spec, "easy-test-0", ENDLESS)
    assert result.observation == "Error: the query took more than 0.2 s"


def test_endless_statements_of_one_session_leave_others_alone(spec):
    with ThreadPoolExecutor(4) as threads:
        slow = [threads.submit(answered, spec, "easy-test-0", ENDLESS) for _ in range(2)]
        items = [f"medium-test-{i}" for i in range(20)]
        rewards = list(threads.map(lambda item: played(spec, item, Style.AGENTGYM), items))
        assert rewards == [1.0] * 20
        assert [future.result().reward for future in slow] == [0.0, 0.0]


@pytest.mark.slow
def test_many_hostile_statements_leave_the_other_sessions_alone():
    spec = make_spec(edited(EnvsSection(), {"sqlgym.query_timeout_s": 0.05}))
    hostile = [
        ENDLESS,
        "SELECT printf('%.*c', 2000000000, 'x')",
        "SELECT " + ", ".join(["hex(zeroblob(99000))"] * 399),
    ]
    with ThreadPoolExecutor(64) as threads:
        bad = [threads.submit(answered, spec, "easy-test-0", s) for s in hostile * 10]
        items = [f"medium-test-{i}" for i in range(34)]
        rewards = list(threads.map(lambda item: played(spec, item, Style.AGENTGYM), items))
        assert rewards == [1.0] * 34
        assert [each.result().reward for each in bad] == [0.0] * 30


def test_state_is_cut_to_a_hundred_characters(spec):
    long = answered(spec, "easy-test-0", "SELECT '" + "x" * 300 + "'").observation
    assert long == "[('" + "x" * 97 + "..."
    assert answered(spec, "easy-test-0", "SELECT 1, NULL").observation == "[(1, None)]"


def test_second_statement_is_refused(spec):
    env = new_episode(spec)
    env.reset("easy-test-0", 0)
    assert env.step(env.valid_actions()[0]).is_valid
    assert env.valid_actions() == []
    assert env.expert_action() is None
    with pytest.raises(RuntimeError, match="ended"):
        env.step("SELECT 1")
    env.close()


def test_bird_observation_tells_names_keys_and_references(bird_dir):
    env = new_episode(bird_spec(bird_dir), Style.AGENTGYM)
    told, question = env.reset("bird-test-0", 0).split("\n\n")
    env.close()
    assert question == "What are Ann's pets called?"
    assert told == (
        "pets contains tables such as owner, pet. Table owner has columns such as id, name. "
        "id is the primary key. Table pet has columns such as id, owner id, name. "
        " is the primary key. The name of pet is the foreign key of name of owner."
    )


def test_bird_evidence_is_told_in_the_compact_style_only(bird_dir):
    env = new_episode(bird_spec(bird_dir))
    assert env.reset("bird-test-0", 0) == (
        "owner(id, nm)\npet(id, owner_id -> owner, n)\n"
        "question: What are Ann's pets called?\nhint: Ann is an owner"
    )
    env.close()


def test_bird_numbers_are_agentgyms_whatever_the_folder_has(bird_dir):
    spec = bird_spec(bird_dir)
    assert item_of(spec, 2) == "bird-train-2"
    assert item_of(spec, 9428) == "bird-test-0"
    for number, told in ((3, "3 train"), (9427, "3 train"), (9429, "1 test"), (-1, "3 train")):
        with pytest.raises(UnknownItem, match=f"no data index {number}: the folder has {told}"):
            item_of(spec, number)


def test_generated_numbers_count_train_then_test(spec):
    assert item_of(spec, 0) == "easy-train-0"
    assert item_of(spec, 599) == "hard-train-199"
    assert item_of(spec, 600) == "easy-test-0"
    for index in (-1, 900):
        with pytest.raises(UnknownItem, match="the last is 899"):
            item_of(spec, index)


def test_rows_count_once_and_looking_at_the_design_is_reading(bird_dir):
    spec = bird_spec(bird_dir)
    gold = "SELECT n FROM pet WHERE owner_id = 1"
    many = "WITH RECURSIVE k(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM k WHERE i < 3000) "
    right = answered(spec, "bird-test-0", gold)
    again = answered(spec, "bird-test-0", f"{many} SELECT n FROM ({gold}), k")
    assert again.reward == right.reward
    assert again.is_valid
    for statement in ("PRAGMA table_info(pet)", "SELECT random()"):
        assert answered(spec, "bird-test-0", statement).is_valid


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("CREATE TEMP TABLE t AS SELECT * FROM pet", "[]"),
        ("CREATE TEMPORARY VIEW t AS SELECT 1", "[]"),
        ("PRAGMA query_only = 0", "[]"),
        ("PRAGMA cache_size = -1000000", "[]"),
        ("PRAGMA journal_mode = WAL", "[('delete',)]"),
        ("PRAGMA foreign_key_check", "[]"),
        ("SELECT name FROM pragma_table_info('owner')", "[('id',), ('nm',)]"),
    ],
)
def test_what_stays_in_a_session_runs_as_at_agentgyms(bird_dir, statement, told):
    path = bird_dir / "dev" / "dev_databases" / "pets" / "pets.sqlite"
    before, spec = path.read_bytes(), bird_spec(bird_dir)
    result = answered(spec, "bird-test-0", statement)
    assert (result.observation, result.reward, result.is_valid) == (told, 0.0, True)
    assert answered(spec, "bird-test-0", "SELECT * FROM sqlite_temp_master").observation == "[]"
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["pets.sqlite"]


def test_missing_database_is_a_failure_not_a_reward(bird_dir):
    spec = bird_spec(bird_dir)
    broken = answered(spec, "bird-train-1", "SELECT 1")  # BIRD's own is wrong
    assert (broken.reward, broken.done) == (0.0, True)
    with pytest.raises(EnvFailure, match="lacks database 'lost'"):
        answered(spec, "bird-train-2", "SELECT 1")
    (bird_dir / "dev" / "dev_databases" / "pets" / "pets.sqlite").unlink()
    with pytest.raises(EnvFailure, match=r"pets\.sqlite is missing"):
        answered(spec, "bird-test-0", "SELECT 1")


def test_check_names_what_the_bird_folder_lacks(bird_dir):
    options = edited(EnvsSection(), {"sqlgym.bird_dir": str(bird_dir)})
    assert check(options) == []
    (bird_dir / "dev" / "dev_tables.json").unlink()
    assert [line for line in check(options) if "dev_tables.json is missing" in line]


def test_tasks_name_existing_items(spec):
    assert {name: len(task.test) for name, task in spec.tasks.items()} == {
        "SQL-Easy": 100,
        "SQL-Medium": 100,
        "SQL-Hard": 100,
    }
    for task in spec.tasks.values():
        env = new_episode(spec)
        for item_id in (task.train[-1], task.test[-1]):
            assert item_id.startswith(task.subset)
            assert env.reset(item_id, 0)
        env.close()


def first_observations() -> list[str]:
    env = new_episode(make_spec(EnvsSection()))
    said = []
    for item_id in ("easy-train-7", "medium-test-31", "hard-train-150"):
        said += [env.reset(item_id, 0), env.fingerprint()]
        said += [result.observation for result in expert_results(env)]
    env.close()
    return said


@pytest.mark.slow  # two interpreters start
def test_items_are_the_same_in_every_process():
    for hash_seed in (0, 1):
        told = elsewhere(__name__, "first_observations()", hash_seed=hash_seed)
        assert told == first_observations()
