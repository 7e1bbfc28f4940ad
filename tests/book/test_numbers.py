"""Are numbers in prose read as a reader reads them, and matched as rounding allows?"""

from decimal import Decimal

import pytest

from . import numbers


def required(found):
    return [str(n.value.normalize()) if not n.version else n.text for n in found if n.must_occur()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("about 0.49 of it", ["0.49"]),
        ("from −0.18 to -0.47", ["-0.18", "-0.47"]),
        ("(−0.147, −0.294)", ["-0.147", "-0.294"]),
        ("0.6–0.9 and 0.6-0.9", ["0.6", "0.9", "0.6", "0.9"]),
        ("take 1 - 0.25 of it", ["0.25"]),
        ("a 64-64-10 net, a 784-128-10 net", ["784", "128"]),
        ("13,781 and 4,294,967,296 paths", ["13781", "4294967296"]),
        ("1.3e-5, 2.95e-05, 1.3 × 10⁻⁵, 10⁻¹²", ["0.000013", "0.0000295", "0.000013", "1E-12"]),
        ("0.9¹⁰⁰ falls", ["0.9", "1E+2"]),
        ("86 % or 4.5% or 7 percent", ["86", "4.5", "7"]),
        ("float64, W_2, conv2d, W_100, x86, MobileNetV3, v1.2", []),
        ("torch 2.13.0 on Python 3.11", ["2.13.0", "3.11"]),
        ("3 nodes, 5 leaves, 12 of 64", []),
        ("Ends with 0.57.", ["0.57"]),
        ("step 1,000", ["1E+3"]),
        ("lr=-0.3, =0.5", ["-0.3", "0.5"]),
        ("['-0.147', '-0.294']", ["-0.147", "-0.294"]),
        ("see https://doi.org/10.1000/182.55 there", []),
        ("tensor(0x7f3a12345678)", []),
        ("[1., 0.5, -.25]", ["0.5", "-0.25"]),
    ],
)
def test_text(text, expected):
    found = required(numbers.in_text(text))
    assert [Decimal(x) if x.count(".") < 2 else x for x in found] == [
        Decimal(x) if x.count(".") < 2 else x for x in expected
    ]


@pytest.mark.parametrize(
    ("tex", "expected"),
    [
        (r"\frac{dL}{dw} = -0.147", ["-0.147"]),
        (r"y - 0.21 = 0.5", ["0.21", "0.5"]),
        (r"\eta -0.1", ["0.1"]),
        (r"x \approx -0.5", ["-0.5"]),
        (r"-1.4 \cdot 0.21 \cdot 0.5 = -0.147", ["-1.4", "0.21", "0.5", "-0.147"]),
        (r"1.3 \times 10^{-5}", ["0.000013"]),
        (r"10^{-12} + 10^{3}", ["1E-12", "1000"]),
        (r"1.1^{100} \approx 13{,}781", ["1.1", "100", "13781"]),
        (r"4\,294\,967\,296", ["4294967296"]),
        (r"e^{-0.5 x}", ["-0.5"]),
        (r"W_{100} x_{0.5}", []),
        (r"86\,\%", ["86"]),
        (r"a &= 0.5 \\ &= -0.25", ["0.5", "-0.25"]),
        (r"x \in \mathbb{R}^{5 \times 3}", []),
        (r"\tag{1.25} x", []),
    ],
)
def test_math(tex, expected):
    found = required(numbers.in_math(tex))
    assert [Decimal(x) for x in found] == [Decimal(x) for x in expected]


def one(text):
    (number,) = numbers.in_text(text)
    return number


@pytest.mark.parametrize(
    ("prose", "output", "same"),
    [
        ("0.49", "0.4899", True),
        ("0.49", "0.4951", False),
        ("0.490", "0.49", False),  # claims a digit that was not printed
        ("0.147", "-0.147", False),
        ("-0.147", "-0.147000", True),
        ("−0.15", "-0.147", True),
        ("86 %", "0.8612", True),
        ("86 %", "0.8712", False),
        ("0.86", "86.2 %", True),
        ("86 %", "86", True),
        ("13,781", "13780.6", True),
        ("13,781", "13782", False),
        ("1.3e-5", "1.2861e-05", True),
        ("1.3 × 10⁻⁵", "0.0000131", True),
        ("2.13.0", "2.13.0", True),
        ("2.13.0", "2.13.1", False),
        ("10⁻¹²", "1e-12", True),
        ("1e-12", "0.0", False),
    ],
)
def test_rounded_alike(prose, output, same):
    assert one(prose).matches(one(output)) is same


def test_code_gives_literals_with_sign_and_texts_but_no_comments():
    found = numbers.in_source('w = -0.147  # 0.999\nprint(f"rate {w} of 0.21", y - 0.5, 1e-3)')
    assert sorted(n.value for n in found) == sorted(
        map(Decimal, ["-0.147", "0.21", "0.5", "0.001"])
    )
    assert one("0.5000").matches(numbers.in_source("x = 0.5")[0], exact=True)


def test_list_of_numbers_is_written_as_printed():
    assert numbers.same_print("13,781", one("13,781"))
    assert numbers.same_print("-0.147", one("−0.147"))
    assert numbers.same_print("86 %", one("86 %"))
    assert numbers.same_print("86", one("86 %"))
    assert not numbers.same_print("0.147", one("−0.147"))
