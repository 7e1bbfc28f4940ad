r"""Which numbers does a page state, and where does each come from?

A decimal, a number of three or more digits, or a percentage that is printed in prose must occur,
rounded alike, in an output or in a source line of the same notebook: 0.49 is found in an output
that says 0.4899, and 86 % in one that says 0.86. The sign counts. Read as numbers are
``−0.147``, ``13,781``, ``13{,}781``, ``1.3e-5``, ``1.3 × 10⁻⁵``, ``1.3 \times 10^{-5}``,
``10^{-12}``. Not read are digits that belong to a name (``float64``, ``W_2``), and links.

What the notebook can't show gets its source in the notebook's metadata:

    "numbers": {"2.13.0": "requirements.txt", "2019": "year of the cited paper"}
"""

import ast
import re
from dataclasses import dataclass
from decimal import Decimal

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
MINUS = "-−"
DIGITS = r"(?:\d{1,3}(?:[,\u202f\u2009]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)*|(?<!\d)\.\d+)"
NUMBER = re.compile(
    rf"(?P<mantissa>{DIGITS})"
    r"(?:[eE](?P<e>[-+−]?\d+)(?![\w.])"
    r"|\s*[×·]\s*10\^(?P<power>[-+−]?\d+))?"
    r"(?:\^(?P<exponent>[-+−]?\d+))?"
    r"(?P<percent>\s*(?:%|percent\b))?"
)
# LaTeX commands after which a minus is a sign, not a difference.
RELATION = re.compile(
    r"\\(?:approx|to|in|le|ge|leq|geq|ne|neq|lt|gt|sim|quad|qquad|equiv|rightarrow|Rightarrow|mid"
    r"|cdot|times|left|begin\{\w+\*?\}|\\)(?![A-Za-z])"
)


@dataclass(frozen=True)
class Printed:
    """A number as printed: its text, its value, and the power of ten of its last digit."""

    text: str
    value: Decimal
    last: int
    percent: bool = False
    version: bool = False  # 2.13.0 and the like

    def must_occur(self):
        whole = self.last >= 0 and self.value == int(self.value)
        return not whole or self.percent or self.version or abs(self.value) >= 100

    def rounds_to(self, value):
        """Whether a value, rounded to as many digits, is this number."""
        return abs(value - self.value) <= Decimal(5).scaleb(self.last - 1)

    def matches(self, other, exact=False):
        """Whether this number was rounded from `other`.

        Args:
            exact: `other` is a literal in code, which may be printed with more digits.
        """
        if self.version or other.version:
            return self.version and other.version and self.text == other.text
        if other.value == 0 and self.value != 0:
            return False
        scales = {0, 2 * (self.percent - other.percent)}  # 86 % and 0.86 are one number
        for shift in scales:
            value, last = other.value.scaleb(shift), other.last + shift
            if (exact and value == self.value) or (self.last >= last and self.rounds_to(value)):
                return True
        return False


def in_text(text):
    """Numbers printed in plain text, inline code, an output, or code."""
    text = re.sub(r"https?://\S+|\b0x[0-9a-fA-F]+|\{[a-z:]+\}`[^`]*`", " ", text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda match: "^" + match[0].translate(SUPERSCRIPTS), text)
    return list(_numbers(text))


def in_math(tex):
    """Numbers printed in a LaTeX formula."""
    tex = re.sub(r"\\(?:label|ref|eqref|tag|color)\{[^{}]*\}", " ", tex)
    tex = re.sub(r"(?<=\d)(?:\{,\}|\\,)(?=\d{3}(?!\d))", ",", tex)
    tex = re.sub(r"\\(?:[,;:!> ]|%)", lambda match: "%" if match[0] == "\\%" else "", tex)
    tex = re.sub(r"\\(?:times|cdot)\s*(?=10\s*\^)", "×", tex)
    tex = re.sub(r"\^\s*\{\s*([-+]?\d+)\s*\}", r"^\1", tex)
    tex = re.sub(r"_\s*\{[^{}]*\}|_\s*\w", "", tex)
    tex = re.sub(r"\\\\(?:\[[^\]]*\])?", "=", tex)
    tex = RELATION.sub("=", tex)
    tex = re.sub(r"\\[A-Za-z]+\s*", "x ", tex).replace("&", " ")
    return list(_numbers(tex, math=True))


def _numbers(text, math=False):
    for match in NUMBER.finditer(text):
        before = text[: match.start()]
        if re.search(r"[A-Za-z_\d]\.?$", before) and not (math and before[-1].isalpha()):
            continue  # digits of a name, or the tail of one: float64, W_2, v1.2
        if before.endswith("^"):
            before = before[:-1].rstrip() or "x"
        yield from _printed(match, _sign(before, math))


def _sign(before, math):
    stripped = before.rstrip() if math else before
    if not stripped or stripped[-1] not in MINUS:
        return ""
    earlier = stripped[:-1].rstrip() if math else stripped[:-1]
    ends = ")]}_%." + "'" * math  # in text a quote opens: '-0.147'
    difference = bool(earlier) and (earlier[-1].isalnum() or earlier[-1] in ends)
    return "" if difference else "-"


def _printed(match, sign):
    digits = re.sub(r"[,\u202f\u2009]", "", match["mantissa"])
    text = sign + match[0].strip()
    if digits.count(".") > 1:
        yield Printed(text=digits, value=Decimal(0), last=0, version=True)
        return
    exponent = match["exponent"]
    if exponent and digits != "10":  # 0.9^100: two numbers
        yield from _printed(NUMBER.match(match["mantissa"]), sign)
        yield from _printed(NUMBER.match(exponent.lstrip("+-−")), "")
        return
    if exponent:
        digits, power = "1", exponent
    else:
        power = match["e"] or match["power"] or "0"
    value = Decimal(sign + digits).scaleb(int(power.replace("−", "-")))
    yield Printed(text, value, value.as_tuple().exponent, bool(match["percent"]))


def in_source(source):
    """Numbers in code and its texts, but not in comments: nothing checks what a comment says."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell magic
        return in_text(source)
    found, negated = [], set()
    for node in ast.walk(tree):  # parents come before their children
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            negated.add(node.operand)
        if not isinstance(node, ast.Constant):
            continue
        if isinstance(node.value, str):
            found += in_text(node.value)
        elif type(node.value) in (int, float) and abs(node.value) < float("inf"):
            value = Decimal(repr(node.value)) * (-1 if node in negated else 1)
            found.append(Printed(str(value), value, value.as_tuple().exponent))
    return found


def same_print(text, number):
    """Whether a key of the notebook's list of numbers is this printed number."""

    def plain(printed):
        printed = printed.replace("−", "-").replace("{,}", "").replace("\\%", "%")
        return re.sub(r"[\s,\u202f\u2009\\]", "", printed)

    wanted = plain(number.text)
    return plain(text) in (wanted, wanted.removesuffix("%"))
