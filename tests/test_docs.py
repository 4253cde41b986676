"""Links of README and docs/ lead somewhere, named files and names exist, words are the field's.

The tests of words also read docstrings and comments of the package.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import io
import math
import pathlib
import re
import tokenize

import pytest

from jaxops._bench import figures, report, results

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MODULES = sorted((ROOT / "jaxops").rglob("*.py"))
FOLDERS = "benchmarks|cmake|common|cpu|cuda|docs|examples|ffi|jaxops|scripts|tests"
SOURCES = {".cc", ".cu", ".cuh", ".h", ".py"}

# Words that earlier documents gave private meanings, with the words of the field.
PRIVATE_WORDS = {
    r"amid": "inside",
    r"anew": "again",
    r"besides?": "next to, and",
    r"(?:gradients?|derivatives?) by": "with respect to; input gradient, kernel gradient",
    r"(?:on (?:its|their)|under) way": "in flight",
    r"(?:so|as) many as (?:it|they) (?:has|have)": "its number",
    r"packs?": "vector",
    r"pieces?": "segment",
    r"recipes?": "the loop or the table",
    r"so many": "N, this number of",
    r"stretch(?:es)?": "segment",
    r"walks?|walk(?:ed|ing)": "loop over",
    r"made (?:anew|again)": "computed again",
}
# A sentence begins with its subject.
OPENINGS = r"(?:^|[.:;] |\| |- )(Of|What|Those)\b(?![^.]*\?)"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
texts = pytest.mark.parametrize("text", [*PAGES, *MODULES], ids=lambda t: str(t.relative_to(ROOT)))


def prose(text):
    """The lines of a page, or of a module's docstrings and comments, numbered, without code."""
    written = text.read_text()
    if text.suffix == ".py":
        return [(n, re.sub(r"`+[^`\n]*`+", "`code`", line)) for n, line in _comments(written)]
    written = re.sub(r"^```.*?^```$", _blank, written, flags=re.MULTILINE | re.DOTALL)
    written = re.sub(r"`[^`\n]*`", "`code`", written)
    written = re.sub(r"\]\([^)\s]*\)", "]", written)
    return list(enumerate(written.split("\n"), 1))


def _comments(source):
    """The lines of docstrings and comments, numbered."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False) or ""
            for number, line in enumerate(docstring.split("\n")):
                yield node.body[0].lineno + number, line.strip()


def _blank(match):
    return "\n" * match[0].count("\n")


def anchors(page):
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@functools.cache
def names_of_sources():
    """Every identifier of the C++ and Python sources."""
    found = set()
    for folder in FOLDERS.split("|"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in SOURCES:
                found.update(re.findall(r"\w+", file.read_text()))
    return found


@pages
def test_links(page):
    broken = []
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE):
        target = "".join(target)
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def pages_of_operators():
    """The names of the pages about operators, by the table of contents."""
    index = (ROOT / "docs" / "index.md").read_text()
    _, _, contents = index.partition(":caption: Operators\n")
    names = contents.partition("\n\n")[2].partition("\n:::")[0].split()
    return [name for name in names if name != "flax"]


def test_every_page_of_an_operator_begins_with_a_picture():
    """It is in one of the first two sections, and has a text for those who cannot see it."""
    without = []
    for name in pages_of_operators():
        sections = (ROOT / "docs" / f"{name}.md").read_text().split("\n## ")
        if not re.search(rf"!\[[^\]]+\]\(pictures/{name}\.svg\)", "".join(sections[:3])):
            without.append(name)
    assert without == []


def test_pictures_of_operators_are_drawn(tmp_path):
    """Their names are compared, because versions of matplotlib write other bytes."""
    pytest.importorskip("matplotlib")
    file = ROOT / "scripts" / "draw_operators.py"
    spec = importlib.util.spec_from_file_location("draw_operators", file)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.draw(tmp_path, program.DRAWINGS)
    drawn = {picture.name for picture in tmp_path.iterdir()}
    assert drawn == {f"{name}.svg" for name in pages_of_operators()}


def test_rooflines_are_those_of_the_newest_file():
    text = (ROOT / "docs" / "results.md").read_text()
    newest = max((ROOT / "benchmarks" / "results").glob("h200-*-targets.json")).name
    assert f"--from benchmarks/results/{newest} --plot" in text


@pages
def test_named_files_exist(page):
    """Benchmarks, examples and scripts may be named in commands, other folders in code spans."""
    text = page.read_text()
    named = re.findall(r"(?:python |`)((?:benchmarks|examples|scripts)/[\w.\-]+)", text)
    named += re.findall(rf"`((?:{FOLDERS})/[\w./*\-]*)`", text)
    missing = [n for n in named if "FILE" not in n and not any(ROOT.glob(n.rstrip("/")))]
    assert missing == []


def test_some_files_are_named():
    assert "examples/conv2d_digits.py" in (ROOT / "docs" / "install.md").read_text()


@pages
def test_named_code_exists(page):
    """Kernels, classes and constants that documents name are in the sources."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(?:\w+\.)*([A-Z][a-z]+[A-Z]\w*|k[A-Z]\w+|test_\w+)`", text)
    assert [name for name in named if name not in names_of_sources()] == []


@pages
def test_every_linked_page_is_a_page(page):
    """Every page can be reached by links."""
    if page.name == "README.md":
        return
    others = [other for other in PAGES if other != page]
    assert any(re.search(rf"\]\((?:docs/)?{page.name}[)#]", o.read_text()) for o in others)


@pages
def test_times_are_those_of_results_files(page):
    """A time is "`CASE` forward: 1.23 µs, fastest peer 4.56 [NAME]"; NAME is a link to a file."""
    text = page.read_text()
    files = dict(re.findall(r"^\[([^\]]+)\]: \.\./(benchmarks/results/\S+)$", text, re.MULTILINE))
    shown = re.findall(r"`([^`]+)` (\w+): ([\d.,]+) µs, ([^|;]+?) ([\d.,]+) \[([^\]]+)\]", text)
    assert text.count(" µs, fastest peer ") <= len(shown) + 1  # the legend has one more
    wrong = []
    for case, direction, ours, peer, theirs, file in shown:
        rows = results.load(ROOT / files[file]).rows
        found = [
            (report.number(row.ours.us), report.number(_time_of(row, peer)))
            for row in rows
            if (row.case, row.direction) == (case, direction)
        ]
        if (ours, theirs) not in found:
            wrong.append((case, direction, ours, theirs, found))
    assert wrong == []


def _time_of(row, peer):
    if peer != "fastest peer":
        return row.outcomes[peer].us if peer in row.outcomes else None
    return min(row.outcomes[name].us or math.inf for name in figures.peers([row]))


def rows_behind():
    """The table of `docs/performance.md`: how often and how far a peer is faster, in every file."""
    lines = [
        "| file | operator | rows | behind | mean speed-up | least |",
        "| :-- | :-- | --: | --: | --: | --: |",
    ]
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        rows = [row for row in results.load(file).rows if row.ours.us is not None]
        for operator in dict.fromkeys(row.operator for row in rows):
            fastest = [
                (row, min(timed, key=lambda outcome: outcome.us))
                for row in rows
                if row.operator == operator
                and (timed := [o for n, o in row.outcomes.items() if row.is_peer(n) and o.us])
            ]
            behind = sum(figures.beyond_spread(peer, row.ours) for row, peer in fastest)
            ratios = [peer.us / row.ours.us for row, peer in fastest]
            lines.append(
                f"| `{file.name}` | `{operator}` | {len(fastest)} | {behind} "
                f"| {figures.geomean(ratios):.2f} | {min(ratios):.2f} |"
            )
    return "\n".join(lines)


def test_rows_behind_are_those_of_results_files():
    _, _, after = (ROOT / "docs" / "performance.md").read_text().partition("<!-- rows behind -->\n")
    assert after.split("\n\n")[0] == rows_behind()


@texts
def test_words(text):
    found = [
        f"{text.name}:{number}: {match[0]!r}: write {plain!r}"
        for number, line in prose(text)
        for word, plain in PRIVATE_WORDS.items()
        for match in re.finditer(rf"\b(?:{word})\b", line, re.IGNORECASE)
    ]
    assert found == []


@texts
def test_sentences_begin_with_their_subject(text):
    found = [
        f"{text.name}:{number}: {line.strip()}"
        for number, line in prose(text)
        if not line.startswith("#") and re.search(OPENINGS, line)
    ]
    assert found == []
