"""Laws of the SQL environment's statements: execution, grading, refusal and limits."""

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.config.envs import EnvsSection
from envhub.env import Style
from envhub.envs.sqlgym.env import make_spec
from envhub.envs.sqlgym.generated import questions
from tests.configs import edited
from tests.envhub.envs.playing import new_episode
from tests.envhub.envs.sqlgym.pets import answered, bird_spec, played

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"


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
def test_writing_statement_is_refused(bird_dir, statement):
    path = bird_dir / "train" / "train_databases" / "pets" / "pets.sqlite"
    before = path.read_bytes()
    result = answered(bird_spec(bird_dir), "bird-train-0", statement)
    assert result.observation.startswith("Error: ")
    assert (result.reward, result.done, result.is_valid) == (0.0, True, False)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["pets.sqlite"]


def test_agentgym_error_has_no_prefix():
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
def test_bounded_functions_equal_sqlites(spec, statement):
    plain = sqlite3.connect(":memory:")
    expected = str(plain.execute(statement).fetchall())
    plain.close()
    assert answered(spec, "easy-test-0", statement).observation == expected


def test_result_beyond_its_bytes_is_refused(spec):
    wide = f"WITH n(i) AS (VALUES {', '.join(f'({i})' for i in range(200))}) "
    result = answered(spec, "easy-test-0", wide + "SELECT hex(zeroblob(99000)) || i FROM n")
    assert result.observation == f"Error: more than {16 << 20} bytes"


def test_endless_statement_reports_its_time_limit(spec):
    result = answered(spec, "easy-test-0", ENDLESS)
    assert result.observation == "Error: the query took more than 0.2 s"


def test_endless_statements_do_not_delay_other_sessions(spec):
    with ThreadPoolExecutor(4) as threads:
        slow = [threads.submit(answered, spec, "easy-test-0", ENDLESS) for _ in range(2)]
        items = [f"medium-test-{i}" for i in range(20)]
        rewards = list(threads.map(lambda item: played(spec, item, Style.AGENTGYM), items))
        assert rewards == [1.0] * 20
        assert [future.result().reward for future in slow] == [0.0, 0.0]


@pytest.mark.long
def test_many_hostile_statements_do_not_affect_other_sessions():
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


def test_duplicate_rows_count_once_and_pragmas_may_read(bird_dir):
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
def test_temporary_changes_run_within_their_session(bird_dir, statement, told):
    path = bird_dir / "dev" / "dev_databases" / "pets" / "pets.sqlite"
    before, spec = path.read_bytes(), bird_spec(bird_dir)
    result = answered(spec, "bird-test-0", statement)
    assert (result.observation, result.reward, result.is_valid) == (told, 0.0, True)
    assert answered(spec, "bird-test-0", "SELECT * FROM sqlite_temp_master").observation == "[]"
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["pets.sqlite"]
