"""Laws of the reward functions: what they receive, what they return, and how they fail."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.errors import ConfigError
from common.repository import ROOT
from envhub.env import EnvFailure
from envhub.envs.dataset.env import check, make_spec
from envhub.envs.dataset.graders import exact_number, exact_text, final_answer, last_number, math
from tests.envhub.envs.dataset.made import DAPO, make, played


@pytest.mark.parametrize(("answer", "reward"), [("7", 1.0), ("8", 0.0)])
def test_named_keywords_reach_the_function(tmp_path: Path, answer: str, reward: float) -> None:
    assert played(make(tmp_path, reward="user:right"), answer).reward == reward


def test_trl_signature_is_accepted_as_it_is(tmp_path: Path) -> None:
    options = make(tmp_path, reward="user:trl")
    assert played(options, "so 3+4=<<3+4=7>>7\n#### 7").reward == 1.0
    assert played(options, "7").reward == 0.0


def test_function_of_trl_gets_token_ids(tmp_path: Path) -> None:
    tokenizer = str(ROOT / "configs/policies/tiny-arithmetic")
    options = make(tmp_path, reward="user:trl_ids", tokenizer=tokenizer)
    ids = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").encode(
        "7 + 4", add_special_tokens=False
    )
    assert played(options, "7 + 4").reward == pytest.approx(len(ids.ids) / 100)
    (line,) = check(make(tmp_path, reward="user:trl_ids"))
    assert "needs 'completion_ids'; set data.tokenizer" in line


def test_function_of_trl_logs_metrics_of_the_episode(tmp_path: Path) -> None:
    metrics = played(make(tmp_path, reward="user:trl_logs"), "banana").metrics or {}
    assert metrics["reward_trl_logs_share_of_a"] == pytest.approx(0.3)


def test_function_of_trl_may_not_apply_to_a_record(tmp_path: Path) -> None:
    file = f"{tmp_path}/user.py"
    reward = {"right": f"{file}:right", "other": f"{file}:trl_of_others"}
    result = played(make(tmp_path, reward=reward), "7")
    assert result.reward == 0.5
    assert "reward_other" not in (result.metrics or {})
    with pytest.raises(EnvFailure, match=r"no reward applies to record 1 of train\.jsonl"):
        played(make(tmp_path, reward="user:trl_of_others"), "7")


def test_chosen_answer_wins_over_columns_of_the_keywords(tmp_path: Path) -> None:
    record = {"prompt": "2+2?", "answer": "5", "ground_truth": "6", "mine": "4"}
    for reward in ("exact_number", "user:trl_without_logs"):
        chosen = make(tmp_path, [record], reward=reward, answer="mine")
        assert played(chosen, "4").reward == 1.0
        assert played(chosen, "5").reward == played(chosen, "6").reward == 0.0
    assert played(make(tmp_path, [record], reward="exact_number"), "6").reward == 1.0


@pytest.mark.parametrize("reward", ["exact_text", "exact_number"])
@pytest.mark.parametrize("answer", [None, " "])
def test_record_without_a_reference_answer_is_refused(
    tmp_path: Path, reward: str, answer: str | None
) -> None:
    records = [{"question": "a", "answer": "1"}, {"question": "b", "answer": answer}]
    (line,) = check(make(tmp_path, records, reward=reward))
    assert line == (
        f"record 2 of train.jsonl: the record has no reference answer, which reward {reward} needs;"
        " 1 such record in the train data"
    )
    assert check(make(tmp_path, records, reward="user:half")) == []


@pytest.mark.parametrize("grade", [exact_number, exact_text, math])
def test_missing_reference_answer_is_an_error_and_no_score(grade: Any) -> None:
    with pytest.raises(ValueError, match="reference answer"):
        grade("None", None)


def test_verl_signature_is_accepted_as_it_is(tmp_path: Path) -> None:
    options = make(tmp_path, DAPO, reward="user:verl")
    assert played(options, "it is 16", item=1).reward == 1.0


def test_dictionary_of_verl_has_the_score_and_metrics(tmp_path: Path) -> None:
    result = played(make(tmp_path, reward="user:verl_scores"), "7")
    named = {name: value for name, value in (result.metrics or {}).items() if name != "reward_s"}
    assert named == {"reward_verl_scores": 1.0, "reward_verl_scores_acc": 1.0}
    assert result.reward == 1.0
    assert played(make(tmp_path, reward="user:verl_scores"), "8").reward == 0.0
    pair = played(make(tmp_path, reward="user:pair"), "abc")
    assert (pair.reward, (pair.metrics or {})["reward_pair_length"]) == (0.5, 3.0)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        ({"reward": 0.5, "is_correct": True}, 0.5),
        ({"overall": 0.5, "format": 1.0}, 0.5),
        ({"rewards": [0.5]}, 0.5),
        ([0.5], 0.5),
        (True, 1.0),
    ],
)
def test_returned_forms_of_other_libraries_are_read(
    tmp_path: Path, value: object, reward: float
) -> None:
    file = tmp_path / "other.py"
    file.write_text(f"def f(completion):\n    return {value!r}\n", encoding="utf-8")
    assert played(make(tmp_path, reward=f"{file}:f"), "7").reward == reward


@pytest.mark.parametrize("key", ["reward", "step"])
def test_missing_package_of_a_call_is_named_before_the_start(tmp_path: Path, key: str) -> None:
    file = tmp_path / "lazy.py"
    file.write_text(
        "def lazy(completion, answer):\n"
        "    import no_such_package\n"
        "    return no_such_package.verify(completion, answer)\n",
        encoding="utf-8",
    )
    options = make(tmp_path, reward="user:half")
    given: dict[str, Any] = {key: f"{file}:lazy"}
    (line,) = check(replace(options, dataset=replace(options.dataset, **given)))
    where = "reward.lazy" if key == "reward" else "data.step"
    assert line.startswith(f"{where}={file}:lazy: a call with an example fails: ")
    assert "No module named 'no_such_package' (lazy.py, line 2); install the package" in line


def test_other_error_with_an_example_is_no_refusal(tmp_path: Path) -> None:
    file = tmp_path / "narrow.py"
    file.write_text("def narrow(completion):\n    return 1 / 0\n", encoding="utf-8")
    assert check(make(tmp_path, reward=f"{file}:narrow")) == []


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("", "list[dict[str, str]]"),
        ("from __future__ import annotations", "list[dict[str, str]]"),
        ("from typing import Union", "Union[str, list[dict[str, str]]]"),
        ("", "str | list"),
        ("from __future__ import annotations", "str | list"),
    ],
)
def test_list_of_verifiers_form_has_the_messages(tmp_path: Path, before: str, kind: str) -> None:
    file = tmp_path / "form.py"
    file.write_text(
        f"{before}\n"
        f"def form(prompt: list, completion: {kind}, **kwargs):\n"
        "    asked = [each['role'] for each in prompt]\n"
        "    answered = [each['content'] for each in completion]\n"
        "    return float((asked, answered) == (['user'], ['7']))\n",
        encoding="utf-8",
    )
    assert played(make(tmp_path, reward=f"{file}:form"), "7").reward == 1.0


def test_rating_that_does_not_apply_leaves_the_others_to_decide(tmp_path: Path) -> None:
    file = f"{tmp_path}/user.py"
    rating = {"function": f"{file}:rating_of_others", "min": 1, "max": 5}
    options = make(tmp_path, reward={"right": f"{file}:right", "rating": rating})
    # The sum has the range [1, 6]. A rating that does not apply counts as 1.
    assert played(options, "7").reward == pytest.approx(0.2)
    assert played(options, "8").reward == 0.0
    assert played(options, "so").reward == pytest.approx(0.4)


def test_weighted_rewards_are_scaled_and_named(tmp_path: Path) -> None:
    file = f"{tmp_path}/user.py"
    reward = {
        "right": f"{file}:right",
        "style": {"function": f"{file}:half", "weight": 0.5},
        "length": {"function": f"{file}:returns_two", "weight": -0.25, "min": 0, "max": 4},
    }
    result = played(make(tmp_path, reward=reward), "7")
    # The sum is 1 + 0.25 - 0.5 = 0.75 in [-1, 1.5].
    assert result.reward == pytest.approx(1.75 / 2.5)
    assert result.metrics is not None
    named = {name: value for name, value in result.metrics.items() if name != "reward_s"}
    assert named == {"reward_right": 1.0, "reward_style": 0.5, "reward_length": 2.0}


def test_start_score_is_the_scaled_zero(tmp_path: Path) -> None:
    reward = {"length": {"function": f"{tmp_path}/user.py:returns_two", "min": -1, "max": 3}}
    assert make_spec(make(tmp_path, reward=reward)).start_score == 0.25


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("breaks", "KeyError: 'lost'"),
        ("hangs", "no answer within 0.2 s"),
        ("waits", "no answer within 0.2 s"),
        ("returns_none", "returned None, which is not a number"),
        ("returns_nan", "returned nan, which is not a finite number"),
        ("returns_two", "returned 2, outside of [0, 1]; set reward.returns_two.min"),
    ],
)
def test_failed_reward_names_function_record_and_error(
    tmp_path: Path, name: str, words: str
) -> None:
    limit_s = 0.2 if words.startswith("no answer") else 60.0
    options = make(tmp_path, reward=f"user:{name}", reward_timeout_s=limit_s)
    with pytest.raises(EnvFailure) as caught:
        played(options, "7", item=1)
    assert str(caught.value).startswith(f"reward {name} failed on record 2 of train.jsonl: {words}")


def test_failed_reward_is_called_again(tmp_path: Path) -> None:
    assert played(make(tmp_path, reward="user:second_try", reward_retries=1), "7").reward == 1.0


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (None, "reward is not set: give reward=module:function"),
        ("nothing_such", "expects module:function, file.py:function or one of exact_number"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("missing.py:f", "missing.py: no such file or folder"),
        ("user:absent", "has no function 'absent'; it has right, half"),
        ("user:NUMBER", "NUMBER is int, not a function"),
        ("user:ranks", "the function compares a group; set groups.reward="),
        ("user:needs_more", "the function needs 'judge', which is not offered; the keywords are"),
        ({"a": {"function": "exact_number", "wait": 1}}, "reward.a.wait=1: no such key"),
        ({"a": {"weight": 1}}, "expects a function, or a section with function="),
        ({"a": {"function": "exact_number", "weight": "x"}}, "reward.a.weight=x: must be a number"),
        ({"a": {"function": "exact_number", "min": 2}}, "reward.a.min=2: must be < reward.a.max=1"),
        ({"a": {"function": "exact_number", "weight": 0}}, "the weight of every reward is 0"),
        ({"a b": "exact_number"}, "the name must consist of letters, digits and _"),
        (["exact_number"], "expects a function, or a map"),
    ],
)
def test_wrong_reward_is_refused_before_the_start(tmp_path: Path, reward: Any, words: str) -> None:
    (line,) = check(make(tmp_path, reward=reward))
    assert words in line


def test_failing_module_is_refused_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1 / 0\n", encoding="utf-8")
    (line,) = check(make(tmp_path, reward=f"{tmp_path}/broken.py:f"))
    assert line.endswith("broken.py fails: ZeroDivisionError: division by zero (broken.py, line 1)")


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 1,250.50 in all", "2501/2"), ("3/4", "3/4"), ("no", None), ("-7.", "-7"), ("x.5", "1/2")],
)
def test_last_number_of_a_text_is_read(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (None if found is None else str(found)) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("\u22127", "-7"),
        ("-$7.50", "-15/2"),
        ("5-3", "3"),
        ("1.250,50", "2501/2"),
        ("1.250.000", "1250000"),
        ("1,00,000", "100000"),
        ("10 000 km", "10000"),
        ("-10 000,50", "-20001/2"),
        ("3 100/200", "7/2"),
        ("2020 100", "100"),
        ("The answer is **5**.", "5"),
        ("**-5**", "-5"),
        ("y = 5 ** 2", "25"),
        ("x ** 2", None),
        (r"$x = -\boxed{5}$", "-5"),
        (r"-\boxed{\frac{1}{2}}", "-1/2"),
        (r"8 - 3 = \boxed{5}", "5"),
        (r"8-\boxed{5}", "5"),
        ("-$5$", "-5"),
        ("$10$-$5$", "5"),
        ("10%-15%", "15"),
        ("-{\\frac{1}{2}}", "-1/2"),
        ("-(3 1/2)", "-7/2"),
        (r"\text{Answer: }-5", "-5"),
        (r"{-}5", "-5"),
        ("-\u20b95", "-5"),
        ("-US$5", "-5"),
        ("Rs.1,250", "1250"),
        ("It is negative **5**.", "-5"),
        ("**minus 5**", "-5"),
        ("It fell to minus 5.", "-5"),
        ("(-1)/2", "-1/2"),
        ("{1}/{2}", "1/2"),
        ("(3+4)/2 = 3.5", "7/2"),
        ("(a + 1)/2", None),
        (r"\frac{\sqrt{3}}{2}", None),
        ("is**7**", "7"),
        ("5 **7**", "7"),
        ("1.**5**", "5"),
        ("**1**/2", "1/2"),
        ("**2**3**", "8"),
        ("= -**5**", "-5"),
        ("= - **5**", "-5"),
        ("- **5**", "5"),
        ("7 - **5**", "5"),
        ("= -*5*", "-5"),
        ("= -`5`", "-5"),
        (r"\boxed{-\text{5}}", "-5"),
        ("= -{5}", "-5"),
        ("= -<b>5</b>", "-5"),
        ("= -\u200b5", "-5"),
        ("It is negative 5.", "-5"),
        ("The sum is minus 5.", "-5"),
        ("12 minus 5", "5"),
        ("1\u202f250", "1250"),
        (r"1{,}250", "1250"),
        (r"10,\!000", "10000"),
        ("1~000~000", "1000000"),
        ("3,5", "7/2"),
        ("1, 2, 3", "3"),
        ("\uff11\uff12", "12"),
        ("\u0663\u066b\u0665", "7/2"),
        ("1e3", "1000"),
        (r"2 \times 10^{-3}", "1/500"),
        ("10\u2075", "100000"),
        ("25 cm\u00b2", "25"),
        ("25 m^2", "25"),
        ("25 m2", "25"),
        ("25 m<sup>2</sup>", "25"),
        (r"25 \text{ cm}^2", "25"),
        ("2 x 10<sup>3</sup>", "2000"),
        ("2 X 10^3", "2000"),
        ("2^{1/2}", None),
        ("2^0.5", None),
        (r"\sqrt{5}", None),
        (r"2\sqrt{5}", None),
        ("5\u03c0", None),
        (r"\sqrt{25} = 5", "5"),
        (r"3\,\frac{1}{2}", "7/2"),
        (r"\frac{1}2", "1/2"),
        (r"\frac{\text{1}}{2}", "1/2"),
        ("3 1/2", "7/2"),
        ("3\u00bd", "7/2"),
        (r"-\frac{1}{2}", "-1/2"),
        ("7/0", None),
        ("inf", None),
        ("1e999999999", None),
        ("9^99999999", None),
    ],
)
def test_last_number_is_read_as_it_is_written(text: str, number: str | None) -> None:
    read = last_number(text)
    assert (None if read is None else str(read)) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("x = - 5", "-5"),
        ("(3, - 5)", "-5"),
        ("- 5.", "-5"),
        ("$- 5$", "-5"),
        ("- $5", "-5"),
        ("-\\,5", "-5"),
        ("- \\frac{1}{2}", "-1/2"),
        ("\\frac{- 1}{2}", "-1/2"),
        ("-(1/2)", "-1/2"),
        ("10 - 5", "5"),
        ("3-(5)", "5"),
        ("Options:\n- 5\n- 7", "7"),
        ("the answer - 5", "5"),
    ],
)
def test_sign_apart_from_its_number_is_read(text: str, number: str) -> None:
    assert str(last_number(text)) == number
    assert exact_number(f"\\boxed{{{text}}}", number) == 1.0


def test_text_in_answer_tags_is_the_final_answer() -> None:
    assert exact_text("So <answer>no</answer> or <answer> True </answer>.", "true") == 1.0
    assert exact_number("<answer>5</answer>, as 2 and 3 are.", "5") == 1.0


@pytest.mark.parametrize("answer", ["#### 18 ####", "#### 18\n####\n", "#### 17\n#### 18"])
def test_mark_after_the_final_answer_does_not_hide_it(answer: str) -> None:
    assert exact_number(answer, "18") == 1.0


@pytest.mark.parametrize("answer", ["9" * 5000, "1/" + "9" * 5000, "9" * 200_000, "9^9^9^9"])
def test_answer_of_many_digits_is_wrong(answer: str) -> None:
    assert exact_number(answer, "7") == 0.0
    assert exact_text(answer, "7") == 0.0


def test_long_numbers_are_compared_exactly() -> None:
    assert exact_number("9" * 5000, "9" * 5000) == 1.0
    assert exact_number("9" * 5000, "9" * 4999 + "8") == 0.0


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        ("50 percent", "0.5", 1.0),
        (r"50\,\%", "0.5", 1.0),
        ("50%", "50", 1.0),
        ("50%", "0.5", 1.0),
        ("0.5", "50%", 1.0),
        ("5%", "0.5", 0.0),
    ],
)
def test_percentage_equals_its_share(answer: str, reference: str, reward: float) -> None:
    assert exact_number(answer, reference) == reward


@pytest.mark.parametrize(
    "part", ["1,11", "1.", "1 ", "1/", "1^", "-", r"-\boxed{1}", r"\frac{", "1e", r"\text{"]
)
def test_long_answer_is_graded_in_linear_time(part: str) -> None:
    began_s = time.process_time()
    exact_number(part * (100_000 // len(part)), "7")
    assert time.process_time() - began_s < 2.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{1}, no, \boxed{\{2\}}", r"\{2\}"),
        (r"\boxed{\boxed{2}}", "2"),
        (r"\boxed{3} and \boxed{", "3"),
        ("#### Result\n\\boxed{4}", "4"),
        ("a #### 7", "7"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (" yes ", "yes"),
    ],
)
def test_final_answer_follows_its_mark(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_root_as_the_reference_is_no_number_to_compare() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        exact_number("3", r"2\sqrt{3}")


def test_exact_text_compares_letters_and_no_code_points() -> None:
    assert exact_text("Caf\u00e9", "cafe\u0301") == 1.0


def test_exact_text_ignores_case_and_spaces() -> None:
    assert exact_text("#### New  York", "new york") == 1.0
    assert exact_text("York", "new york") == 0.0


def test_missing_math_verify_is_named(tmp_path: Path) -> None:
    pytest.importorskip("importlib.util")
    from importlib.util import find_spec

    if find_spec("math_verify") is not None:
        pytest.skip("math-verify is installed")
    (line,) = check(make(tmp_path, reward="math"))
    install = "pip install math-verify (the extra `math`)"
    assert line == f"reward=math needs math-verify. Install it with: {install}"


def test_unreadable_reference_is_no_reward(tmp_path: Path) -> None:
    options = make(tmp_path, [{"prompt": "?", "answer": "none"}])
    with pytest.raises(EnvFailure, match="reference answer 'none' holds no number"):
        played(options, "3")


def test_error_of_the_configuration_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        make_spec(make(tmp_path, reward="nothing_such"))


@pytest.mark.slow
def test_function_of_trl_without_keywords_for_logs_is_called(tmp_path: Path) -> None:
    assert played(make(tmp_path, reward="user:trl_without_logs"), "#### 7").reward == 0.0
    answer = "3+4=<<3+4=7>>7\n#### 7"
    assert played(make(tmp_path, reward="user:trl_without_logs"), answer).reward == 1.0


def test_unfinished_episode_has_the_facts_of_its_item(tmp_path: Path) -> None:
    section = replace(make(tmp_path, reward="none", step="step"), gives_facts=True)
    result = played(section, "wait")
    assert not result.done
    facts = result.facts or {}
    assert facts["columns"]["answer"] == "3+4=<<3+4=7>>7\n#### 7"
    assert (facts["columns"]["solution_str"], facts["completions"]) == ("wait", "wait")
    assert "messages" not in facts  # They grow with each turn, and are in the tokens.


def test_reward_none_pays_nothing_and_gives_the_facts_of_its_group(tmp_path: Path) -> None:
    section = replace(make(tmp_path, reward="none"), gives_facts=True)
    result = played(section, "7")
    assert (result.reward, result.is_success) == (0.0, False)
    facts = result.facts or {}
    assert facts["columns"]["answer"] == "3+4=<<3+4=7>>7\n#### 7"
    assert facts["prompts"] == "Tom has 3 pens and buys 4. How many?"
    assert facts["completion"] == facts["completions"] == "7"
    assert (
        played(make(tmp_path, reward="none"), "7").facts is None
    )  # Without functions over groups.
