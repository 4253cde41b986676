"""docs/errors.md has every message of the package and of its installation, and no other.

A message in the sources is the literal text of its f-string, with a placeholder for each value. A
row of the page has the same text, with `<...>` or one word for a placeholder.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jaxops"
PAGE = ROOT / "docs" / "errors.md"
# The messages of commands and of what serves tests are not on the page.
OTHERS = ("_bench", "_cli", "testing")
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in OTHERS
]
BUILD = [
    *sorted((ROOT / "cmake").glob("*.cmake")),
    *(ROOT / folder / "CMakeLists.txt" for folder in (".", "cpu", "cuda")),
]
VALUE = "\0"  # a placeholder in a template

# Functions that return the end of a message, which is collected with it.
ENDS = {"_unexpected"}
# Functions that return a reason, and the argument of others that is one: its position or its name.
# Reasons have rows of their own.
REASONS = {"missing_kernels", "_find_missing"}
REASON_ARGUMENTS = {"PlatformStatus": "reason", "_refuse": 2}
# Messages and reasons whose text is collected where it is made.
COLLECTED = {
    "_core/native.py": {"_statuses['cuda'].reason", "found.reason", "reason", "str(error)"},
}


def templates(expression, ends):
    """The texts that an expression may be, with `VALUE` for what is known at run time."""
    match expression:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            found = [""]
            for part in parts:
                found = [a + b for a in found for b in templates(part, ends)]
            return found
        case ast.FormattedValue(value=ast.Call(func=ast.Name(id=name))) if name in ends:
            return [t for value in ends[name] for t in templates(value, ends)]
        case ast.IfExp(body=body, orelse=orelse):
            return [*templates(body, ends), *templates(orelse, ends)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return [a + b for a in templates(left, ends) for b in templates(right, ends)]
        case _:
            return [VALUE]


def returned(function):
    """The expressions that a function returns, without None."""
    found = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return [value for value in found if value is not None and ast.unparse(value) != "None"]


def messages_of(tree):
    """Each message of a module, as the kind of its error or warning, the expression and the line.

    Reasons have no kind.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=None):
                continue
            case ast.Raise(exc=ast.Call(func=kind, args=[text, *_])):
                found = [(ast.unparse(kind), text)]
            case ast.Raise(exc=error):
                found = [(ast.unparse(error), error)]
            case ast.Call(
                func=ast.Attribute(attr="warn") | ast.Name(id="warn"), args=[text, *others]
            ):
                found = [(ast.unparse(others[0]) if others else "UserWarning", text)]
            case ast.Call(func=ast.Name(id=name)) if name in REASON_ARGUMENTS:
                found = [("", value) for value in arguments(node, REASON_ARGUMENTS[name])]
            case ast.FunctionDef(name=name) if name in REASONS:
                found = [("", value) for value in returned(node)]
            case _:
                continue
        for kind, text in found:
            yield kind, text, text.lineno


def arguments(call, which):
    """The argument of a call at a position or of a name, if it is given."""
    if isinstance(which, int):
        return call.args[which : which + 1]
    return [k.value for k in call.keywords if k.arg == which]


@functools.cache
def in_package():
    """The kind and the template of every message of the package, with the lines that have it."""
    found = {}
    for path in MODULES:
        tree = ast.parse(path.read_text())
        ends = {f.name: returned(f) for f in tree.body if getattr(f, "name", None) in ENDS}
        collected = COLLECTED.get(path.relative_to(PACKAGE).as_posix(), ())
        for kind, text, line in messages_of(tree):
            if ast.unparse(text) not in collected:
                for template in templates(text, ends):
                    found.setdefault((kind, template), []).append(f"{path.name}:{line}")
    return found


@functools.cache
def in_build():
    """The templates of the build's errors, its warnings and its reasons to build no CUDA module."""
    found = {}
    for path in BUILD:
        source = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.MULTILINE)
        known = dict(re.findall(r'set\((needed_gpu) "([^"]+)"\)', source))
        calls = re.findall(
            r"(?:message\(\s*(?!STATUS)\w+|set\(JAXOPS_CPU_ONLY)((?:\s+\"[^\"]+\")+)\)", source
        )
        begun = re.findall(r"message\(\s*(?!STATUS|\[)\w|set\(JAXOPS_CPU_ONLY \"[^\"]", source)
        assert len(calls) == len(begun), path
        for quoted in calls:
            text = "".join(re.findall(r'"([^"]+)"', quoted))
            text = re.sub(r"\$\{(\w+)\}", lambda m, k=known: k.get(m[1], m[0]), text)
            template = re.sub(r"\$(ENV)?\{\w+\}", VALUE, text)
            found.setdefault(("", template), []).append(path.name)
    return found


@functools.cache
def rows():
    """The kind and the message of every row of the page. Reasons and the build have no kind."""
    found = re.findall(r"^\| (?:(\w+) )?(`+) ?(.+?) ?\2 \| ", PAGE.read_text(), re.MULTILINE)
    return [(kind, message) for kind, _, message in found]


def is_message(template, row):
    """Whether a row shows a template. A value is a placeholder of the page, or one word."""
    texts = map(re.escape, template.split(VALUE))
    return re.fullmatch(r"(?:<[^<>]+>|[\w.]+)".join(texts), row) is not None


def without_row(found):
    """The messages that no row shows, with the lines that have them."""
    return {
        f"{kind}: {template.replace(VALUE, '<value>')}": lines
        for (kind, template), lines in found.items()
        if not any(kind == k and is_message(template, row) for k, row in rows())
    }


def test_the_page_has_all_messages_of_the_package():
    assert without_row(in_package()) == {}


def test_the_page_has_all_messages_of_the_build():
    assert without_row(in_build()) == {}


def test_the_page_has_no_other_messages():
    made = [*in_package(), *in_build()]
    others = [
        row
        for kind, row in rows()
        if not any(kind == k and is_message(template, row) for k, template in made)
    ]
    assert others == []


def test_no_message_has_two_rows():
    shown = [row for _, row in rows()]
    assert len(shown) > 100
    assert sorted(shown) == sorted(set(shown))


def test_every_message_has_words():
    """A message without any is made by a function, which a constant above must name."""
    found = in_package().items()
    assert [lines for (_, text), lines in found if not re.search(r"[^\W\d_]{2}", text)] == []
