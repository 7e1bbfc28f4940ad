r"""What is the value of a printed formula?  LaTeX straight to NumPy, for a strict subset.

* Numbers ``0.5``, ``13{,}781``, ``\pi``, ``e``; symbols, the longest run of tokens that the
  environment names: ``W_2``, ``\hat m``, ``f'``, ``\frac{\partial L}{\partial W_2}``.
* Entries, counted from 1: ``x_i``, ``W_{ij}``, ``u_{i+1}``, ``x_3``. An index that has a value
  picks an entry from within a symbol, too: ``\frac{\partial L}{\partial W_{ij}}``.
* ``+ - / ^ \frac \sqrt``, elementwise; ``^\top`` makes a vector a row.
* Products, side by side or ``\cdot``: of matrices, ``u \cdot v`` of vectors, scaling otherwise;
  ``\odot`` elementwise; ``\times`` with a number on one side.
* ``\sum_i``, ``\sum_{i=1}^{N}`` of the rest of the product; ``\prod`` of one factor.
* Functions, `KNOWN` and callables of the environment, with brackets; those of `BARE` also of one
  factor without: ``y \log p``. ``|x|``, ``\lVert g \rVert``, ``\lVert g \rVert_1``.
* The indicator ``\mathbb{1}[z > 0]``; ``\underbrace{a b}_{\text{name}}``, a named product.

Spaces and ``\left \right \big`` mean nothing. Anything else is an error that names the place;
so are shapes that would both be broadcast, as in ``[N, 1] - [N]``.
"""

import re

import numpy as np
import torch

TOKEN = re.compile(
    r"""(?P<space> [\s~] | \\[,;:!\ ] | \\(?:left|right|[bB]igg?[lr]?|q?quad)(?![A-Za-z]) )
    | (?P<label> \}_ ) \{\\text\{[^{}\d]*\}\}
    # Tokens with their argument; they lose braces and spaces, so that W_{2} is W_2.
    | (?P<whole> \\mathbb\{1\}\[ | \^\s*(?: \\top(?![A-Za-z]) | \{\s*\\top\s*\} )
      | (?: _ | \\(?:hat|bar|tilde|math[a-z]+|text|operatorname)(?![A-Za-z]) ) \s*
        (?: \{ (?:[^{}]|\{[^{}]*\})* \} | \\[A-Za-z]+ | [A-Za-z0-9] ) )
    # x^12 and x^y_i mean less than they seem; h^{(1)} and dL are parts of names: no value for them.
    | \^\s*(?: \d(?=\d) | (?:[A-Za-z]|\\[A-Za-z]+)(?=\s*[_']|\() ) | \^\{\( | d[A-Za-z]
    | \d{1,3}(?:\{,\}\d{3})+(?:\.\d+)? | \d+(?:\.\d+)?
    | \\(?:frac|sqrt|underbrace)\{ | \}\{ | \^\{ | \\[A-Za-z]+ | \\?.""",
    re.VERBOSE | re.DOTALL,
)
ELEMENTWISE = {"+": np.add, "-": np.subtract, "/": np.divide, "\\odot": np.multiply}
RELATIONS = {">": np.greater, "<": np.less, "=": np.equal}
ENDS = {"", "+", "-", ",", ")", "]", "}", "}{", "}_", "|", "\\rvert", "\\rVert", *RELATIONS}
BARE = {rf"\{name}": getattr(torch, name) for name in ("exp", "log", "sin", "cos", "tanh")}
KNOWN = {**BARE, "\\sigma": torch.sigmoid, r"\operatorname{relu}": torch.relu,
         r"\operatorname{softmax}": lambda z: torch.softmax(z, -1),
         "\\max": np.maximum, "\\min": np.minimum, "\\pi": np.pi, "e": np.e}  # fmt: skip


class LatexError(ValueError):
    """The formula is not in the subset, or a symbol in it is not in the environment."""


def tokens(tex):
    """The tokens, closed by an empty one, and their places."""
    found = [m for m in TOKEN.finditer(tex) if not m["space"]]
    names = [re.sub(r"[{}\s]", "", m[0]) if m["whole"] else m["label"] or m[0] for m in found]
    return (*names, ""), (*[m.start() for m in found], len(tex))


def number(value):
    return torch.as_tensor(value, dtype=torch.float64).detach().numpy()


def evaluate(tex, env, index=None):
    """The value of one side of an equation; `index` gives letters a position, from 1."""
    return Parser(tex, env, index or {}).until("")


class Parser:
    """Recursive descent that computes while it reads."""

    def __init__(self, tex, env, index):
        self.tex, self.at, self.index, self.sizes = tex, 0, dict(index), {}
        self.tokens, self.places = tokens(tex)
        self.env = {tokens(name)[0][:-1]: v if callable(v) else number(v)
                    for name, v in {**KNOWN, **env}.items()}  # fmt: skip

    @property
    def token(self):
        return self.tokens[self.at]

    def refuse(self, condition, why):
        if condition:
            at = self.places[self.at]
            raise LatexError(f"{why}, at {at}: {self.tex[at : at + 25]!r} in {self.tex!r}")

    def take(self, *options):
        """Move past the next token if it is one of these; the token, or nothing."""
        token = self.token if self.token in options else ""
        self.at += bool(token)
        return token

    def until(self, *closing, read=None):
        value = (read or self.expression)()
        self.refuse(self.token not in closing, f"expected {' or '.join(closing) or 'the end'}")
        self.at += 1
        return value

    def expression(self):
        total = -self.term() if self.take("-") else self.term()
        while sign := self.take("+", "-"):
            total = self.combine(sign, total, self.term())
        return total

    def term(self):
        left, sign = self.factor(), ""
        while self.token not in ENDS:
            self.refuse(sign == "/", "a/b before a factor is ambiguous: use \\frac or brackets")
            sign = self.take("\\cdot", "\\times", "\\odot", "/")
            self.refuse(not sign and self.token[0].isdigit(), "a number as factor needs \\cdot")
            left = self.combine(sign, left, self.factor())
        return left

    def combine(self, sign, left, right):
        if sign in ELEMENTWISE:
            return self.elementwise(ELEMENTWISE[sign], left, right)
        if not (left.ndim and right.ndim):
            return left * right
        vectors = left.ndim == right.ndim == 1
        left = left[:, None] if left.ndim < right.ndim and len(right) == 1 else left
        fit = left.shape[-1] == right.shape[0] and sign != "\\times" and (sign or not vectors)
        self.refuse(not fit, f"{left.shape} times {right.shape}: use ^\\top, \\cdot, \\odot?")
        product = left @ right
        return product[0] if product.shape == (1,) and left.ndim == 2 else product

    def elementwise(self, operation, left, right):
        small, large = sorted([left.shape, right.shape], key=lambda s: (len(s), np.prod(s)))
        fit = all(m in (1, n) for m, n in zip(small[::-1], large[::-1], strict=False))
        self.refuse(not fit, f"{left.shape} and {right.shape} do not fit, or broadcast both ways")
        return operation(left, right)

    def factor(self):
        base = self.atom()
        if self.take("^\\top"):
            return base[None] if base.ndim == 1 else base.T
        if (exponent := self.superscript()) is None:
            return base
        square = base.ndim == 2 and len(set(base.shape)) == 1
        self.refuse(square or (base.ndim and exponent.ndim), "which power of an array?")
        return base**exponent

    def superscript(self):
        if sign := self.take("^", "^{"):
            return self.atom() if sign == "^" else self.until("}")

    def atom(self):
        token, rest = self.token, self.tokens[self.at :]
        name = max((k for k in self.env if rest[: len(k)] == k), key=len, default=())
        known = name or token in ATOMS or token in self.index or token[:1].isdigit()
        self.refuse(not known, f"{token or 'the end'} has no value")
        self.at += len(name) or 1
        if name:
            return self.call(name) if callable(self.env[name]) else self.entry(name)
        if token in ATOMS:
            return ATOMS[token](self)
        return np.float64(self.index.get(token, token.replace("{,}", "")))

    def entry(self, name):
        array = self.env[name]
        text = "".join(t[1:] for t in name if t[0] == "_" and set(t[1:]) <= self.index.keys())
        if not text and self.token[:1] == "_":
            text, self.at = self.token[1:], self.at + 1
        place = rf"([{''.join(self.index)}\d])([-+]\d(?!\d))?,?"
        places = re.findall(place, text)
        known = re.fullmatch(f"({place})*", text) and len(places) <= array.ndim
        self.refuse(not known, f"{text} gives no position in {array.ndim} axes")
        for size, (index, offset) in zip(array.shape, places, strict=False):
            self.sizes.setdefault(index, set()).add(size)
            at = int(self.index.get(index, index)) + int(offset or 0)
            self.refuse(not 1 <= at <= size, f"no entry {at} among {size}")
            array = array[at - 1]
        return array

    def call(self, name):
        function = self.env[name]
        if self.take("("):
            values = [self.until(",", ")")]
            while self.tokens[self.at - 1] == ",":
                values.append(self.until(",", ")"))
        else:
            self.refuse(name[0] not in BARE, "a function needs brackets")
            values = [self.factor()]
            self.refuse(self.token not in {*ENDS, "\\cdot", *BARE}, "bracket the argument")
        if function in (np.maximum, np.minimum):
            return self.elementwise(function, *values)
        return number(function(*map(torch.as_tensor, values)))

    def each(self, read):
        """What `read` gives for each value of the index of a sum or product."""
        head = re.fullmatch(r"_([A-Za-z])(?:=(\d+))?", self.token)
        free = head and head[1] not in self.index and (head[1],) not in self.env
        self.refuse(not free, "no free letter to count with")
        self.at += 1
        index, start, stop = head[1], int(head[2] or 1), self.superscript()
        body, values, self.sizes[index] = self.at, [], set()
        if stop is None:
            self.index[index] = start
            read()
            self.refuse(len(self.sizes[index]) != 1, f"how far does {index} go?")
            (stop,) = self.sizes[index]
        self.refuse(not start <= stop == int(stop), f"{index} from {start} to {stop}")
        for self.index[index] in range(start, int(stop) + 1):
            self.at = body
            values.append(read())
        del self.index[index]
        self.refuse(self.token not in ENDS, "use brackets after the sign")
        return values

    def indicator(self):
        left = self.until(*RELATIONS)
        relation = RELATIONS[self.tokens[self.at - 1]]
        return self.elementwise(relation, left, self.until("]")) * 1.0

    def norm(self):
        vector, kind = self.until("\\rVert"), self.take("_1", "_2") or "_2"
        self.refuse(vector.ndim != 1, "a norm of what is no vector")
        return np.linalg.norm(vector, int(kind[1]))


ATOMS = {
    "(": lambda p: p.until(")"),
    "[": lambda p: p.until("]"),
    "|": lambda p: np.abs(p.until("|")),
    "\\lvert": lambda p: np.abs(p.until("\\rvert")),
    "\\lVert": Parser.norm,
    "\\frac{": lambda p: p.elementwise(np.divide, p.until("}{"), p.until("}")),
    "\\sqrt{": lambda p: np.sqrt(p.until("}")),
    "\\sum": lambda p: np.sum(p.each(p.term), axis=0),
    "\\prod": lambda p: np.prod(p.each(p.factor), axis=0),
    "\\mathbb1[": Parser.indicator,
    "\\underbrace{": lambda p: p.until("}_", read=p.term),
}
