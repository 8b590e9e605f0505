"""Executed notebooks as pages and slides that need no network, and bare notebooks for working alone.

README explains the commands. A page holds everything: figures as data, formulas as MathML, no script. Slides add one
script of their own. Both forbid the browser any request by a content security policy, so a page that would need the
network shows it at once, offline or not.

What becomes a slide is decided by rule: the title card, the head of each section, each figure and each cell tagged
`result`, "What we saw", the questions, and what the exercise asks. The prose beside them is the presenter's notes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert
from nbconvert.filters import ansi2html
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from rapo_lib.config import ROOT
from rapo_lib.reference import REFERENCE
from rapo_lib.runs import results_folder

LOOK = Path(__file__).parent / "look"
#: What `export` can write.
KINDS = ("html", "slides")
#: Cells that no slide is made of, whatever they print.
NOT_SHOWN = {"parameters", "injected-parameters", "setup", "exercise"}
#: Cells whose code a page folds away, and under which name.
FOLDED = {"parameters": "parameters", "injected-parameters": "parameters of this run", "setup": "set-up code"}
#: Characters of prose that a slide bears beside a figure, and without one.
SHORT, LONG = 320, 800


# -------------------------------------------------------------------------------------------- formulas

#: What latex2mathml does not know, or writes in a way that browsers do not.
_BEFORE = [
    (re.compile(r"\\\\\[[^\]]*\]"), r"\\\\"),  # \\[2pt]
    (re.compile(r"\\tag\{([^}]*)\}"), r"\\qquad\\text{(\1)}"),
    (re.compile(r"\\arg\s*\\(max|min)"), r"\\operatorname{arg}\\\1"),
    (re.compile(r"\\[bB]igg?l\b"), r"\\left"),
    (re.compile(r"\\[bB]igg?r\b"), r"\\right"),
    (
        re.compile(r"(?<!\\)(?<!left)\|([^|]*)(?<!\\)(?<!right)\|"),
        r"\\left|\1\\right|",
    ),  # so that the bars know their sides
]
_NAMES = "log|ln|exp|tanh|cos|sin"
_AFTER = [
    (re.compile(r'width="negativethinmathspace"'), 'width="-0.167em"'),
    (re.compile(r"<mo>&#x0005E;</mo>"), "<mo>&#x002C6;</mo>"),
    (re.compile(r"<mi>&#x0007E;</mi>"), "<mo>&#x0223C;</mo>"),
    (re.compile(r"<mi>&#x000B1;</mi>"), "<mo>&#x000B1;</mo>"),
    # A minus behind another operator is a sign: no space follows it.
    (
        re.compile(r"(<mo[^>]*>(?!&#x0002[9D];|[)|\]])[^<]*</mo>)<mo>&#x02212;</mo>"),
        r'\1<mo form="prefix">&#x02212;</mo>',
    ),
    # An operator's name stands apart from its neighbours, as in TeX, but not from an opening bracket.
    (re.compile(rf"(?<=[a-z]>)(?=<mi>(?:{_NAMES})</mi>)(?<!<mrow>)"), '<mspace width="0.167em"/>'),
    (re.compile(rf"(<mi>(?:{_NAMES})</mi>)(?!<mo[^>]*>(?:\(|&#x00028;)|<mspace)"), r'\1<mspace width="0.167em"/>'),
]


def formula(tex: str, display: bool = False) -> str:
    """A formula as MathML, which browsers draw without any script or font from elsewhere.

    Args:
        tex: LaTeX without its dollars. display: on a line of its own.

    Raises:
        ValueError: a command that cannot be turned into MathML.

    Example:
        >>> formula("n - 1")
        '<math display="inline"><mrow><mi>n</mi><mo>&#x02212;</mo><mn>1</mn></mrow></math>'
    """
    source = re.sub(r"\\text\{[^}]*\}", lambda m: html.escape(m[0], quote=False), tex.strip())
    for pattern, with_ in _BEFORE:
        source = pattern.sub(with_, source)
    try:
        made = convert(source, display="block" if display else "inline")
    except Exception as e:  # its own many error classes have no common parent
        raise ValueError(f"the formula {tex!r} cannot become MathML: {type(e).__name__} {e}") from None
    for pattern, with_ in _AFTER:
        made = pattern.sub(with_, made)
    if unknown := re.search(r"\\\w+", made):
        raise ValueError(
            f"the formula {tex!r} cannot become MathML: {unknown[0]} is not known; write it in other words"
        )
    return made.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")


class _Renderer(IPythonRenderer):
    """Markdown to HTML with formulas as MathML, links between notebooks as links between pages."""

    def __init__(self) -> None:
        super().__init__(escape=False, exclude_anchor_links=True)

    def inline_math(self, body: str) -> str:
        return formula(body)

    def block_math(self, body: str) -> str:
        return formula(body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return formula(rf"\begin{{{name}}}{body}\end{{{name}}}", display=True)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        return super().link(text, _target(url), title)


def _target(url: str) -> str:
    """Where a link of a notebook leads from a page: to the other page, or to the file that was copied beside it."""
    if "://" in url or url.startswith("#"):
        return url
    if url.endswith(".ipynb"):
        return url.removesuffix(".ipynb") + ".html"
    return f"files/{Path(url).name}"


def markdown_html(text: str) -> str:
    """Markdown of a notebook as HTML.

    Raises:
        ValueError: a formula that cannot become MathML.
    """
    return MarkdownWithMath(renderer=_Renderer()).render(text)


# --------------------------------------------------------------------------------------------- outputs


def output_html(output: Any, alt: str = "") -> str:
    """One output of a cell as HTML; a widget stands as what it shows without a kernel.

    Args:
        output: of nbformat 4. alt: words for a figure.
    """
    if output.output_type == "stream":
        return f"<pre>{ansi2html(output.text)}</pre>"
    if output.output_type == "error":
        return f'<pre class="error">{ansi2html(chr(10).join(output.traceback))}</pre>'
    data = output.data
    if "text/html" in data:
        linked = re.sub(r'(?<=href=")\.\./[^"]+', lambda m: _target(m[0]), data["text/html"])
        return f'<div class="rich">{linked}</div>'
    if "image/png" in data:
        png = data["image/png"].replace("\n", "")
        return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{png}">'
    if "text/markdown" in data:
        return markdown_html(data["text/markdown"])
    plain = data.get("text/plain", "")
    if "application/vnd.jupyter.widget-view+json" in data:
        if re.search(r"\d%\|", plain):  # a progress bar: nothing is left to show
            return ""
        said = "A control that needs a kernel: open this notebook in JupyterLab."
        return f'<p class="widget">{said} <code>{html.escape(plain)}</code></p>'
    return f"<pre>{html.escape(plain)}</pre>"


def _outputs_html(cell: Any, alt: str) -> str:
    return "".join(part for o in cell.outputs if (part := output_html(o, alt)))


def _code_html(source: str) -> str:
    return highlight(source, PythonLexer(), HtmlFormatter(cssclass="code"))


def _tags(cell: Any) -> set[str]:
    return set(cell.metadata.get("tags", []))


# ---------------------------------------------------------------------------------------- parts of prose


@dataclass(frozen=True)
class Chunk:
    """A heading with the prose below it, or prose alone.

    Args:
        level: of the heading, 0 without one. title, text: markdown.
    """

    level: int
    title: str
    text: str


def chunks(markdown: str) -> list[Chunk]:
    """A markdown cell, cut before its headings; what looks like one inside a code block is none.

    Example:
        >>> chunks("# A card\\nwhy?\\n## Next\\nhow")
        [Chunk(level=1, title='A card', text='why?'), Chunk(level=2, title='Next', text='how')]
    """
    found, level, title, lines, fenced = [], 0, "", [], False
    for line in [*markdown.splitlines(), "# end"]:
        fenced ^= line.lstrip().startswith("```")
        heading = None if fenced else re.match(r"(#{1,6}) +(.*)", line)
        if not heading:
            lines.append(line)
            continue
        text = "\n".join(lines).strip()
        if title or text:
            found.append(Chunk(level, title, text))
        level, title, lines = len(heading[1]), heading[2].strip(), []
    return found


_DETAILS = re.compile(r"<details.*?</details>", re.DOTALL)


def without_answers(text: str) -> str:
    """Prose without what is folded away: answers and solutions."""
    return _DETAILS.sub("", text).strip()


def card_rows(text: str, names: Sequence[str]) -> dict[str, str]:
    """Rows of a title card's table, by the bold name in their first column."""
    rows = re.findall(r"^\|\s*\*\*(.+?)\*\*\s*\|\s*(.*?)\s*\|\s*$", text, re.MULTILINE)
    return {name: value for name, value in rows if name in names}


def title_of(nb: nbformat.NotebookNode) -> str:
    """The first heading of a notebook, without its level."""
    return next(
        (c.title for cell in nb.cells if cell.cell_type == "markdown" for c in chunks(cell.source) if c.title), ""
    )


def question_of(nb: nbformat.NotebookNode) -> str:
    """The question on a notebook's title card; empty when it has none."""
    prose = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    return card_rows(prose, ["Question"]).get("Question", "")


def _lead(text: str, limit: int) -> str:
    """The first paragraphs of a text up to a number of characters, and every display formula of it."""
    kept, used, full = [], 0, False
    for paragraph in re.split(r"\n\s*\n", text):
        is_formula = paragraph.lstrip().startswith("$$")
        full |= used + len(paragraph) > limit and bool(kept)
        if is_formula or not full:
            kept.append(paragraph)
            used += 0 if is_formula else len(paragraph)
    return "\n\n".join(kept)


# ----------------------------------------------------------------------------------------------- pages


def page_html(nb: nbformat.NotebookNode, name: str, names: Sequence[str]) -> str:
    """An executed notebook as one page.

    Args:
        nb: the notebook. name: its file name without ending. names: of all notebooks that have pages, in order.

    Raises:
        ValueError: a formula that cannot become MathML.
    """
    body, contents, section = [], [], ""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            parts = []
            for chunk in chunks(cell.source):
                if chunk.level:
                    section = chunk.title
                    parts.append(_heading(chunk, contents))
                parts.append(markdown_html(chunk.text))
            body.append(f'<section class="prose">{"".join(parts)}</section>')
        elif cell.cell_type == "code" and cell.source.strip():
            code, name_of = _code_html(cell.source), next((n for t, n in FOLDED.items() if t in _tags(cell)), "")
            body.append(f"<details><summary>{name_of}</summary>{code}</details>" if name_of else code)
            if shown := _outputs_html(cell, section):
                body.append(f'<div class="output">{shown}</div>')
    at = names.index(name)
    around = [f'<a href="{n}.html">{w} {n[:2]}</a>' for n, w in _neighbours(names, at)]
    bar = f'<nav><a href="index.html">all notebooks</a> {" ".join(around)}</nav>'
    links = "".join(f'<li><a href="#{anchor}">{text}</a></li>' for anchor, text in contents)
    listed = f'<details class="contents"><summary>contents</summary><ul>{links}</ul></details>'
    return _document(title_of(nb) or name, "page.css", f"{bar}{listed}<main>{''.join(body)}</main>{bar}")


def _heading(chunk: Chunk, contents: list[tuple[str, str]]) -> str:
    text = _inline(chunk.title)
    anchor = f"s{len(contents)}"
    contents.append((anchor, text))
    return f'<h{chunk.level} id="{anchor}">{text}</h{chunk.level}>'


def _inline(text: str) -> str:
    return re.sub(r"^<p>(.*)</p>\s*$", r"\1", markdown_html(text).strip(), flags=re.DOTALL)


def _neighbours(names: Sequence[str], at: int) -> Iterator[tuple[str, str]]:
    if at:
        yield names[at - 1], "before:"
    if at + 1 < len(names):
        yield names[at + 1], "next:"


def index_html(entries: Sequence[tuple[str, str, str]], heading: str) -> str:
    """A page with links to all.

    Args:
        entries: (file name without ending, title, question) of each notebook. heading: what they are.
    """
    rows = "".join(
        f'<tr><td><a href="{name}.html">{_inline(title)}</a></td><td>{_inline(question)}</td></tr>'
        for name, title, question in entries
    )
    return _document(heading, "page.css", f"<main><h1>{html.escape(heading)}</h1><table>{rows}</table></main>")


_CODE_CSS = "\n".join(HtmlFormatter(style="default").get_style_defs(f".{name}") for name in ("code", "highlight"))


def _look(name: str) -> str:
    return (LOOK / name).read_text(encoding="utf-8")


def _document(title: str, css: str, body: str, script: str = "") -> str:
    """One HTML file whose policy lets the browser ask nobody for anything, and run no script but ours.

    `css` and `script` are names of files in LOOK.
    """
    script = _look(script) if script else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    policy = (
        f"default-src 'none'; {allowed}img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{_look('common.css')}{_CODE_CSS}{_look(css)}</style></head>\n<body>{body}"
        + (f"<script>{script}</script>" if script else "")
        + "</body></html>\n"
    )


# ---------------------------------------------------------------------------------------------- slides


@dataclass(frozen=True)
class Slide:
    """One screen.

    Args:
        kind: title, section, figure (which gets all room that is left), result or questions. title, body: HTML.
        notes: HTML, the presenter's.
    """

    kind: str
    title: str
    body: str
    notes: str = ""


def make_slides(nb: nbformat.NotebookNode) -> list[Slide]:
    """The slides of an executed notebook, by the rule in this module's head.

    Raises:
        ValueError: a formula that cannot become MathML.
    """
    slides: list[Slide] = []
    section, waiting = "", None  # `waiting`: prose that has not stood on a slide yet
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            for chunk in chunks(cell.source):
                slides += _head_of(waiting)
                section = chunk.title if chunk.level else section
                waiting = chunk
        elif cell.cell_type == "code" and not _tags(cell) & NOT_SHOWN:
            made = _result_slide(cell, section, waiting)
            slides += [made] if made else _head_of(waiting)
            waiting = None
    return slides + _head_of(waiting)


def _head_of(chunk: Chunk | None) -> list[Slide]:
    """The slide of a heading, if it deserves one of its own."""
    if chunk is None or not chunk.level or not chunk.text or chunk.title == "Next":
        return []
    title, notes = _inline(chunk.title), markdown_html(chunk.text)
    if chunk.level == 1:
        rows = card_rows(chunk.text, ["Question", "You will see", "Source"])
        body = "".join(f"<p><b>{name}</b><br>{_inline(value)}</p>" for name, value in rows.items())
        return [Slide("title", title, body or markdown_html(_lead(chunk.text, LONG)), notes)]
    bare = without_answers(chunk.text)
    if len(bare) < 60:  # a heading and half a sentence: the next slide bears the heading too
        return []
    kind = "questions" if chunk.title == "Check yourself" else "section"
    return [Slide(kind, title, markdown_html(bare if kind == "questions" else _lead(bare, LONG)), notes)]


def _result_slide(cell: Any, section: str, waiting: Chunk | None) -> Slide | None:
    """The slide of a code cell, with the prose before it; None when it is none to show."""
    is_figure = any("image/png" in o.get("data", {}) for o in cell.outputs)
    shown = _outputs_html(cell, section)
    if not shown or not (is_figure or "result" in _tags(cell) or section == "What we saw"):
        return None
    text = waiting.text if waiting else ""
    said = (
        f'<div class="said">{markdown_html(_lead(text, SHORT))}</div>' if len(_lead(text, SHORT)) <= 2 * SHORT else ""
    )
    code = f"<details><summary>code</summary>{_code_html(cell.source)}</details>"
    only_figures = is_figure and all(o.output_type == "stream" or "image/png" in o.data for o in cell.outputs)
    return Slide(
        "figure" if only_figures else "result",
        _inline(section),
        f'{said}<div class="output">{shown}</div>{code}',
        markdown_html(text),
    )


def slides_html(nb: nbformat.NotebookNode, name: str) -> str:
    """An executed notebook as slides in one file: arrow keys move, `n` shows the presenter's notes.

    Raises:
        ValueError: a formula that cannot become MathML.
    """
    made = make_slides(nb)
    parts = [
        f'<section class="slide {s.kind}" id="{n}"><h2>{s.title}</h2>'
        f'<div class="body"><div class="fit">{s.body}</div></div>'
        f'<aside class="notes">{s.notes or "<p>no notes</p>"}</aside></section>'
        for n, s in enumerate(made, 1)
    ]
    bar = (
        f'<footer><a href="index.html">all</a> <span>{html.escape(name)}</span> '
        f'<button id="back" aria-label="back">&#9664;</button> <span id="number">1 / {len(made)}</span> '
        f'<button id="on" aria-label="on">&#9654;</button> '
        '<span class="keys">arrows: move, n: notes, f: full screen</span></footer>'
    )
    return _document(title_of(nb) or name, "slides.css", "".join(parts) + bar, "slides.js")


# ----------------------------------------------------------------------------------------------- bare


def bare_notebook(nb: nbformat.NotebookNode, profile: str | None = None) -> nbformat.NotebookNode:
    """A notebook without prose, answers and outputs: headings, questions and code stay.

    Args:
        nb: a source notebook or an executed one. profile: stands in its `parameters` cell; None leaves it.
    """
    cells = []
    for cell in nb.cells:
        tags = _tags(cell)
        if cell.cell_type == "markdown":
            text = "\n\n".join(filter(None, map(_bare_chunk, chunks(cell.source))))
            if text:
                cells.append(nbformat.v4.new_markdown_cell(text, id=cell.id))
        elif cell.cell_type == "code" and not tags & {"injected-parameters", "solution"}:
            source = cell.source
            if profile and "parameters" in tags:
                source = re.sub(r'^profile = "\w+"', f'profile = "{profile}"', source, flags=re.MULTILINE)
            cells.append(nbformat.v4.new_code_cell(source, id=cell.id, metadata={"tags": sorted(tags)}))
    kept = {k: nb.metadata[k] for k in ("kernelspec", "language_info") if k in nb.metadata}
    return nbformat.v4.new_notebook(cells=cells, metadata=kept)


def _bare_chunk(chunk: Chunk) -> str:
    heading = f"{'#' * chunk.level} {chunk.title}" if chunk.level else ""
    text = without_answers(chunk.text)
    if chunk.title not in ("Check yourself", "Change one thing"):
        text = card_rows(text, ["Question"]).get("Question", "") if chunk.level == 1 else ""
    return "\n\n".join(filter(None, [heading, text]))


# --------------------------------------------------------------------------------------------- command


def export(kind: str, profile: str) -> int:
    """Write the executed notebooks of a profile as pages or slides, with an index.

    Args:
        kind: of KINDS. profile: a profile's name, or `reference` for the results that the repository holds.

    Returns:
        0, or 1 when there is no executed notebook.

    Raises:
        ValueError: a formula that cannot become MathML, with the notebook's name.
    """
    folder = REFERENCE if profile == "reference" else results_folder() / profile
    # What is committed is checked against a manifest: nothing is written beside it.
    out = results_folder() / ("of_reference" if profile == "reference" else profile) / kind
    copies = [p for p in sorted((folder / "notebooks").glob("[0-9]*.ipynb")) if ".failed" not in p.name]
    if not copies:
        print(
            f"{_shown(folder)}/notebooks holds no executed notebook; run ./run_all.sh --profile {profile} first, or "
            f"take the committed ones: ./run_all.sh {kind} --profile reference",
            file=sys.stderr,
        )
        return 1
    out.mkdir(parents=True, exist_ok=True)
    names, entries = [p.stem for p in copies], []
    for copy in copies:
        nb = nbformat.read(copy, as_version=4)
        try:
            page = page_html(nb, copy.stem, names) if kind == "html" else slides_html(nb, copy.stem)
        except ValueError as e:
            raise ValueError(f"{copy.name}: {e}") from None
        _copy_files(copy, page, out)
        (out / f"{copy.stem}.html").write_text(page, encoding="utf-8")
        entries.append((copy.stem, title_of(nb) or copy.stem, question_of(nb)))
        print(f"{_shown(out / copy.stem)}.html")
    heading = f"RAPO notebooks, {'slides' if kind == 'slides' else 'pages'} (profile {profile})"
    (out / "index.html").write_text(index_html(entries, heading), encoding="utf-8")
    print(f"{_shown(out / 'index.html')}")
    return 0


def _copy_files(copy: Path, page: str, out: Path) -> None:
    """Lay the files that a page links to beside it, so that the folder can be carried away."""
    linked = set(re.findall(r'href="files/([^"/]+)"', page))
    for path in sorted(p for p in copy.parent.parent.rglob("*") if p.name in linked and out not in p.parents):
        (out / "files").mkdir(exist_ok=True)
        shutil.copyfile(path, out / "files" / path.name)


def export_bare(profile: str | None = None) -> int:
    """Write a bare copy of each source notebook into results/bare/.

    Args:
        profile: what their `parameters` cells say; None leaves the default.

    Returns:
        0.
    """
    out = results_folder() / "bare"
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        nbformat.write(bare_notebook(nbformat.read(path, as_version=4), profile), out / path.name)
        print(_shown(out / path.name))
    return 0


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
