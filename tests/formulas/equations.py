r"""Do all sides of a displayed equation agree?  Splits it at rows and relations.

Rows end at ``\\`` or at a comma before ``\quad``. One that begins with a relation continues the
chain above it, one without a relation the side above it. ``=``, ``:=``, ``\equiv`` mean equal to
1e-9; ``\approx`` means within half a unit of the last digit of the number printed on its right.
"""

import re
from decimal import Decimal, InvalidOperation
from itertools import product

import numpy as np

from .latex import LatexError, evaluate

ROWS = r"\{(?:aligned|split|gathered|(?:align|gather|equation)\*?)\}"
DROPPED = re.compile(rf"&|\\(?:nonumber|notag|(?:label|tag)\{{[^{{}}]*\}}|(?:begin|end){ROWS})")
PART = re.compile(r",\s*\\q?quad\b|\\\\(?:\[[^\]]*\])?|:=|\\[A-Za-z]+|\\?.", re.DOTALL)
ROW, RELATION = r",\s*\\q?quad|\\\\.*", r":?=|\\equiv|\\approx"
TRAILING = re.compile(r"(?:\s|\\q?quad\b|\\[,;!]|[.,;])+$")
RELATIVE, ABSOLUTE = 1e-9, 1e-14  # the second one for zeros up to rounding


def split(tex, pattern):
    """Pieces and, between them, the separators that stand outside brackets."""
    pieces, depth = [""], 0
    for part in PART.findall(tex):
        depth += (part in "([{") - (part in ")]}")
        if depth == 0 and re.fullmatch(pattern, part):
            pieces += [part, ""]
        else:
            pieces[-1] += part
    return [TRAILING.sub("", piece).strip() for piece in pieces]


def chains(tex):
    """The equation as chains of (relation, side): ``[[("", "L"), ("=", "x y")], ...]``."""
    found = []
    for row in split(DROPPED.sub("", tex), ROW)[::2]:
        first, *rest = split(row, RELATION)
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        if not found or (first and pairs):
            found.append([("", first)])
        elif first:
            relation, side = found[-1][-1]
            found[-1][-1] = relation, f"{side} {first}"
        found[-1] += pairs
    return found


def compare(tex, env):
    """Problems of an equation in an environment: none if every side agrees."""
    free = {name: values for name, values in env.items() if isinstance(values, range)}
    env = {name: value for name, value in env.items() if name not in free}
    problems = [f"the index {name} has no values" for name, values in free.items() if not values]
    for chain in chains(tex):
        for places in product(*free.values()):
            index = dict(zip(free, places, strict=True))
            try:
                check(chain, env, index)
            except LatexError as error:
                problems.append(f"{error}{f' for {index}' if index else ''}")
                break
    return problems


def check(chain, env, index):
    values = [np.asarray(evaluate(side, env, index)) for _, side in chain]
    if len(values) < 2:
        raise LatexError(f"no = after {chain[0][1]!r}: is it an entry for DEFINITIONS?")
    # A row of a product such as 1ᵀG counts as the vector it is.
    left, *others = [v[0] if v.ndim == 2 and len(v) == 1 else v for v in values]
    for (relation, side), right in zip(chain[1:], others, strict=True):
        allowed = half_unit(side) if relation == "\\approx" else ABSOLUTE
        sides = f"{chain[0][1]!r} and {side!r}"
        if left.shape != right.shape:
            raise LatexError(f"{sides} have shapes {left.shape} and {right.shape}")
        close = np.isfinite(left) & np.isclose(left, right, RELATIVE, allowed)
        if not close.all():
            at = np.argmin(close)
            raise LatexError(f"{sides} differ: {left.flat[at]:.10g} and {right.flat[at]:.10g}")


def half_unit(side):
    """Half a unit of the last digit of a printed number."""
    text = re.sub(r"\{,\}|\s|\\[,;!]", "", side)
    text = re.sub(r"\\(?:times|cdot)10\^\{?(-?\d+)\}?$", r"e\1", text)
    try:
        return 0.5 * 10.0 ** Decimal(text).as_tuple().exponent
    except InvalidOperation:
        raise LatexError(f"\\approx needs a printed number, not {side!r}") from None
