"""Laws of the SQL environment's items: questions, observations, numbers and missing files."""

import pytest

from common.config.envs import EnvsSection
from envhub.env import EnvFailure, Style, UnknownItem
from envhub.envs.sqlgym.env import check, make_spec
from envhub.envs.sqlgym.generated import questions
from tests.configs import edited
from tests.envhub.envs.playing import elsewhere, expert_results, item_of, new_episode
from tests.envhub.envs.sqlgym.pets import answered, bird_spec, played


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
def test_gold_statement_solves_every_item(spec, difficulty):
    sizes = spec.subsets[difficulty]
    items = [f"{difficulty}-train-{i}" for i in range(sizes.num_train)]
    items += [f"{difficulty}-test-{i}" for i in range(sizes.num_test)]
    assert sum(played(spec, item, Style.COMPACT) for item in items) == len(items)


def test_questions_are_unique_across_both_splits():
    for difficulty in ("easy", "medium", "hard"):
        asked = [q.text for split in ("train", "test") for q in questions(difficulty, split)]
        assert len(set(asked)) == len(asked) == 300


def test_first_observation_lists_tables_and_question(spec):
    env = new_episode(spec)
    lines = env.reset("easy-train-0", 0).split("\n")
    env.close()
    assert lines[0] == "customers(id, name, city, segment, birth_year)"
    assert lines[2].startswith("orders(id, code, customer_id -> customers, product_id -> products")
    assert lines[3].startswith("question: How many ")


def test_bird_observation_lists_columns_keys_and_references(bird_dir):
    env = new_episode(bird_spec(bird_dir), Style.AGENTGYM)
    told, question = env.reset("bird-test-0", 0).split("\n\n")
    env.close()
    assert question == "What are Ann's pets called?"
    assert told == (
        "pets contains tables such as owner, pet. Table owner has columns such as id, name. "
        "id is the primary key. Table pet has columns such as id, owner id, name. "
        " is the primary key. The name of pet is the foreign key of name of owner."
    )


def test_bird_evidence_appears_in_the_compact_style_only(bird_dir):
    env = new_episode(bird_spec(bird_dir))
    assert env.reset("bird-test-0", 0) == (
        "owner(id, nm)\npet(id, owner_id -> owner, n)\n"
        "question: What are Ann's pets called?\nhint: Ann is an owner"
    )
    env.close()


def test_bird_numbers_equal_agentgyms_for_any_folder(bird_dir):
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


def test_missing_database_raises_instead_of_paying_zero(bird_dir):
    spec = bird_spec(bird_dir)
    broken = answered(spec, "bird-train-1", "SELECT 1")  # BIRD's own is wrong
    assert (broken.reward, broken.done) == (0.0, True)
    with pytest.raises(EnvFailure, match="lacks database 'lost'"):
        answered(spec, "bird-train-2", "SELECT 1")
    (bird_dir / "dev" / "dev_databases" / "pets" / "pets.sqlite").unlink()
    with pytest.raises(EnvFailure, match=r"pets\.sqlite is missing"):
        answered(spec, "bird-test-0", "SELECT 1")


def test_check_names_missing_files_of_the_bird_folder(bird_dir):
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
