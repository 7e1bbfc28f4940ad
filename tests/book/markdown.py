"""What does a Markdown cell or page show?  Its prose, formulas, directives and pictures.

MyST's own parser reads the text; directives are opened and their bodies read in turn.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from html import unescape

from markdown_it.renderer import RendererHTML
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.mdit import create_md_parser

# As in _config.yml.
EXTENSIONS = {"amsmath", "attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath",
              "substitution"}  # fmt: skip
DIRECTIVE = re.compile(r"\{([^{}\s]+)\}\s*(.*)", re.DOTALL)
OPTION = re.compile(r"\s*:([\w-]+):\s*(.*)")
CODE = {"code", "code-block", "code-cell", "literalinclude", "raw", "sourcecode"}
PATH_ARGUMENT = CODE | {"bibliography", "figure", "glue", "glue:figure", "image", "include",
                        "math", "solution", "toctree"}  # fmt: skip
SHOWN_ROLES = {"abbr", "guilabel", "kbd", "math", "sub", "sup", "term"}
TAG = re.compile(r"<(script|style)\b.*?</\1>|<!--.*?-->|<[^<>]*>", re.DOTALL | re.IGNORECASE)


@dataclass
class Directive:
    """A directive: its name, what stands beside it, its options, and its body."""

    name: str
    argument: str
    options: dict[str, str]
    body: str


@dataclass
class Page:
    """What one piece of Markdown shows."""

    prose: list[tuple[str, str]] = field(default_factory=list)  # ("text", "code" or "math", it)
    equations: list[tuple[str | None, str]] = field(default_factory=list)  # (label, LaTeX)
    directives: list[Directive] = field(default_factory=list)
    images: list[tuple[str, str]] = field(default_factory=list)  # (source, alt text)
    comments: list[str] = field(default_factory=list)


@cache
def _parser():
    return create_md_parser(MdParserConfig(enable_extensions=EXTENSIONS), RendererHTML)


def read(text):
    """The page that a Markdown text makes."""
    page = Page()
    _read(text, page)
    return page


def _read(text, page):
    for token in _parser().parse(text):
        if token.type == "inline":
            _inline(token.children, page)
        elif token.type in ("fence", "colon_fence") and (match := DIRECTIVE.match(token.info)):
            _directive(match[1], match[2].strip(), token.content, page)
        elif token.type in ("fence", "colon_fence", "code_block"):
            page.prose.append(("code", token.content))
        elif token.type in ("math_block", "math_block_label"):
            _equation(token.info or None, token.content, page)
        elif token.type == "amsmath":
            _equation(None, token.content, page)
        elif token.type == "html_block":
            page.comments += re.findall(r"<!--(.*?)-->", token.content, re.DOTALL)
            page.images += html_images(token.content)
            page.prose.append(("text", without_tags(token.content)))


def _inline(children, page):
    automatic = 0
    for token in children:
        if token.type == "link_open":
            automatic += token.info == "auto"
        elif token.type == "link_close":
            automatic -= token.info == "auto"
        elif token.type == "text" and not automatic:
            page.prose.append(("text", token.content))
        elif token.type == "code_inline":
            page.prose.append(("code", token.content))
        elif token.type.startswith("math_inline"):
            page.prose.append(("math", token.content))
        elif token.type == "image":
            alt = "".join(child.content for child in token.children or [])
            page.images.append((token.attrs.get("src", ""), alt))
            page.prose.append(("text", alt))
        elif token.type == "html_inline":
            page.comments += re.findall(r"<!--(.*?)-->", token.content, re.DOTALL)
            page.images += html_images(token.content)
        elif token.type == "myst_role":
            _role(token.meta["name"], token.content, page)


def _role(name, content, page):
    titled = re.fullmatch(r"(.*)<[^<>]*>\s*", content, re.DOTALL)
    if name == "math":
        page.prose.append(("math", content))
    elif titled or name in SHOWN_ROLES:
        page.prose.append(("text", titled[1] if titled else content))


def _directive(name, argument, content, page):
    options, body = _options(content)
    page.directives.append(Directive(name, argument, options, body))
    if name == "math":
        _equation(options.get("label"), f"{argument}\n{body}".strip(), page)
        return
    if name in ("figure", "image", "glue:figure"):
        page.images.append((argument, options.get("alt", "")))
        page.prose.append(("text", options.get("alt", "")))
    elif argument and name not in PATH_ARGUMENT:
        _read(argument, page)
    if name in CODE:
        page.prose.append(("code", body))
    else:
        _read(body, page)


def _options(content):
    """Options of a directive, as ``:key: value`` lines or between ``---``, and its body."""
    lines = content.split("\n")
    if lines[0].strip() == "---" and "---" in (line.strip() for line in lines[1:]):
        end = next(k for k, line in enumerate(lines) if k and line.strip() == "---")
        pairs = (line.partition(":") for line in lines[1:end])
        return {key.strip(): value.strip() for key, _, value in pairs}, "\n".join(lines[end + 1 :])
    options = {}
    while lines and (match := OPTION.match(lines[0])):
        options[match[1]] = match[2].strip()
        lines.pop(0)
    return options, "\n".join(lines)


def _equation(label, tex, page):
    page.equations.append((label, tex.strip()))
    page.prose.append(("math", tex))


def without_tags(html):
    """The text that a browser shows of a piece of HTML."""
    return unescape(TAG.sub(" ", html))


def html_images(html):
    """The pictures of a piece of HTML and their alt texts ("" where there is none)."""
    found = []
    for tag in re.findall(r"<img\b[^>]*>", html, re.IGNORECASE):
        source, alt = (re.search(rf'\b{key}\s*=\s*"([^"]*)"', tag) for key in ("src", "alt"))
        found.append((source[1] if source else "", alt[1] if alt else ""))
    return found
