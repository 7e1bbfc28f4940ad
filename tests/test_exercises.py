"""Does an exercise tell right from wrong, and an unanswered one from both?"""

import doctest

import numpy as np
import pytest

from bpkit import exercises
from bpkit.exercises import Exercise


def judge(answer):
    assert not isinstance(answer, str), "a number is wanted, not a text"
    if answer != 2:
        return f"{answer} is not the number of operations"


check = Exercise("1.2", judge)


def function_left_empty(x): ...


@pytest.mark.parametrize(
    "answer",
    [
        ...,
        None,
        (1, ...),
        [..., 2],
        {"a": ...},
        function_left_empty,
    ],
)
def test_placeholders_are_unanswered(answer):
    assert repr(check(answer)) == "Exercise 1.2: not answered yet."


def test_right_and_wrong_print_as_sentences():
    assert repr(check(2)) == "Exercise 1.2: right."
    assert repr(check(3)) == "Exercise 1.2: not yet: 3 is not the number of operations."


def test_what_the_judge_raises_becomes_the_sentence():
    assert repr(check("2")) == "Exercise 1.2: not yet: a number is wanted, not a text."
    unfit = Exercise("1.3", lambda answer: None if answer @ np.ones(3) == 3 else "no")
    verdict = unfit(np.ones(2))
    assert not verdict.right
    assert verdict.why.startswith("ValueError: ")


def test_arrays_and_functions_are_answers():
    array = Exercise("1.4", lambda a: None if a.sum() == 3 else f"the sum is {a.sum():g}")
    assert array(np.ones(3)).right
    assert not array(np.zeros(3)).right
    function = Exercise("1.5", lambda f: None if f(3) == 6 else "wrong")
    assert function(lambda x: 2 * x).right
    assert not function(lambda x: x).right


def test_zero_and_false_are_answers():
    assert check(0).answered
    assert check(False).answered


def test_rejects_confirms():
    assert check.rejects(3, "2").startswith("Exercise 1.2: 2 wrong answers are rejected")


def test_rejects_catches_a_check_that_accepts_everything():
    with pytest.raises(AssertionError, match="wrong answer 5 is accepted"):
        Exercise("1.6", lambda answer: None).rejects(5, 6)


def test_rejects_wants_two_real_answers():
    with pytest.raises(AssertionError, match="at least two"):
        check.rejects(3)
    with pytest.raises(AssertionError, match="counts as unanswered"):
        check.rejects(3, None)


def test_a_judge_that_returns_a_truth_value_is_an_error():
    with pytest.raises(TypeError, match="must return None"):
        Exercise("1.7", lambda answer: answer == 2)(2)


def test_docstring_is_true():
    assert doctest.testmod(exercises).failed == 0
