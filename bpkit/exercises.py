"""Is this answer right, and if not, what is wrong with it?  Introduced in chapter 1.

An exercise holds a *judge*: a function that takes the answer and returns None when it is right,
and otherwise one sentence that says what is wrong with it, without giving the solution away.

>>> def judge(nodes):
...     if nodes == 5:
...         return "that counts the three leaves too"
...     if nodes != 2:
...         return f"{nodes} is not the number of operations"
>>> check = Exercise("1.1", judge)
>>> check(...)
Exercise 1.1: not answered yet.
>>> check(5)
Exercise 1.1: not yet: that counts the three leaves too.
>>> check(2)
Exercise 1.1: right.
>>> check.rejects(5, 3)
'Exercise 1.1: 2 wrong answers are rejected, the placeholder counts as unanswered.'
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Exercise", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """What a check says of one answer; prints as the sentence the reader sees."""

    exercise: str
    answered: bool
    right: bool
    why: str = ""

    def __repr__(self) -> str:
        if not self.answered:
            return f"Exercise {self.exercise}: not answered yet."
        if self.right:
            return f"Exercise {self.exercise}: right."
        stop = "" if self.why.endswith((".", "!", "?")) else "."
        return f"Exercise {self.exercise}: not yet: {self.why}{stop}"


class Exercise:
    """A question with a judge.

    Args:
        number: the exercise's number as the page prints it, such as ``"1.2"``.
        judge: takes the answer; returns None if it is right, else a sentence saying what is
            wrong. What it raises is shown as that sentence, so an answer of the wrong type
            or shape need not be foreseen.
    """

    def __init__(self, number: str, judge: Callable[[Any], str | None]) -> None:
        self.number = number
        self.judge = judge

    def __call__(self, answer: Any) -> Verdict:
        """Judge an answer; ``...``, None and a function with an empty body are no answer yet."""
        if _is_placeholder(answer):
            return Verdict(self.number, answered=False, right=False)
        try:
            why = self.judge(answer)
        except Exception as error:
            name = type(error).__name__
            text = str(error).partition("\n")[0]
            why = text if isinstance(error, AssertionError) and text else f"{name}: {text}"
        if why is None:
            return Verdict(self.number, answered=True, right=True)
        if not isinstance(why, str) or not why.strip():
            raise TypeError(
                f"the judge of exercise {self.number} returned {why!r}; it must return None "
                "for a right answer and a sentence for a wrong one"
            )
        return Verdict(self.number, answered=True, right=False, why=why)

    def rejects(self, *wrong: Any) -> str:
        """Assert that these plausible wrong answers are rejected and ``...`` is no answer.

        Raises:
            AssertionError: if fewer than two are given, or one of them passes.
        """
        # Not the assert statement: these checks must hold under python -O too.
        if len(wrong) < 2:
            raise AssertionError(
                f"exercise {self.number}: {len(wrong)} wrong answer(s) given, at least two needed"
            )
        for answer in wrong:
            verdict = self(answer)
            if not verdict.answered:
                raise AssertionError(
                    f"exercise {self.number}: {answer!r} counts as unanswered, "
                    "so it is no wrong answer to test with"
                )
            if verdict.right:
                raise AssertionError(
                    f"exercise {self.number}: the wrong answer {answer!r} is accepted"
                )
        if self(...).answered:
            raise AssertionError(f"exercise {self.number}: the placeholder ... is judged")
        return (
            f"Exercise {self.number}: {len(wrong)} wrong answers are rejected, "
            "the placeholder counts as unanswered."
        )


def _is_placeholder(answer: Any) -> bool:
    if answer is None or answer is ...:
        return True
    if isinstance(answer, tuple | list):
        return any(part is ... for part in answer)
    if isinstance(answer, dict):
        return any(part is ... for part in answer.values())
    code = getattr(answer, "__code__", None)
    return code is not None and code.co_code == _empty.__code__.co_code


def _empty(): ...
