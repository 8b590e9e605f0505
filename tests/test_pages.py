"""Pages and slides need no network and hold every figure and formula; bare notebooks keep code and questions."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from rapo_lib import pages, runs
from rapo_lib.config import ROOT
from rapo_lib.reference import REFERENCE

SOURCES = sorted((ROOT / "notebooks").glob("*.ipynb"))
COPIES = sorted((REFERENCE / "notebooks").glob("*.ipynb"))
FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$]+?\$", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


# -------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    ("tex", "parts"),
    [
        (r"\frac{a}{b}", ["<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>"]),
        (r"\text{inside <retrieve>}", ["inside&#x000A0;&lt;retrieve&gt;"]),
        (r"x \tag{Eq. 12}", ["(Eq.&#x000A0;12)", "<mspace"]),
        (r"j = \arg\max_i c_i", ["<mo>arg</mo>", "<mo>max</mo>"]),
        (r"p \log p", ['<mspace width="0.167em"/><mi>log</mi><mspace width="0.167em"/>']),
        (r"\log(2)", ["<mi>log</mi><mo"]),
        (r"a = -1", ['<mo form="prefix">&#x02212;</mo>']),
        (r"(a) - 1", ["<mo>&#x02212;</mo>"]),
        (r"a\,|b|", ['fence="true" form="prefix">|', 'fence="true" form="postfix">|']),
        (r"a \\[2pt] b", ["<mi>b</mi>"]),
    ],
)
def test_formulas(tex, parts):
    made = pages.formula(tex).replace("&#x0007C;", "|")
    assert all(part in made for part in parts), made
    assert "2pt" not in made and "\\" not in made


def test_a_display_formula_is_a_block_and_an_unknown_command_is_refused():
    assert pages.formula("x", display=True).startswith('<math display="block">')
    assert pages.formula("x").startswith('<math display="inline">')
    with pytest.raises(ValueError, match=r"'\\\\nosuch x' cannot become MathML: \\nosuch is not known"):
        pages.formula(r"\nosuch x")
    with pytest.raises(ValueError, match="cannot become MathML"):
        pages.formula(r"\frac{a}{")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_every_formula_of_the_notebooks_becomes_mathml(path):
    nb = nbformat.read(path, as_version=4)
    prose = [c.source for c in nb.cells if c.cell_type == "markdown"]
    wanted = sum(len(FORMULA.findall(CODE.sub("", text))) for text in prose)
    made = "".join(map(pages.markdown_html, prose))
    assert made.count("<math ") == wanted
    # No dollar that a formula was meant by: what is left stands in code.
    assert not FORMULA.search(re.sub(r"<(pre|code).*?</\1>", "", made, flags=re.DOTALL))


# ---------------------------------------------------------------------------------------------- export


class Resources(HTMLParser):
    """What a page would fetch, where it links to, and what it holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched, self.links, self.tags, self.anchors = [], [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.anchors.add(given.get("id"))
        self.fetched += [v for k, v in attrs if k in ("src", "srcset", "data", "poster", "background", "action")]
        self.fetched += re.findall(r"url\(([^)]*)\)", given.get("style") or "")
        if given.get("href"):
            (self.links if tag == "a" else self.fetched).append(given["href"])


def external(text: str) -> list[str]:
    """Resources that a browser would fetch for a page."""
    styles = "".join(re.findall(r"<style.*?</style>", text, re.DOTALL))
    fetched = Resources(text).fetched + re.findall(r"url\(([^)]*)\)", styles) + re.findall(r"@import[^;]*", styles)
    return [f for f in fetched if not f.startswith("data:")]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('<img src="data:image/png;base64,AA"><a href="https://x.org">x</a>', 0),
        ('<img src="x.png">', 1),
        ('<script src="https://cdn.x.org/a.js"></script><link rel="stylesheet" href="//x.org/a.css">', 2),
        ("<style>@import 'a.css'; p{background:url(http://x.org/a.png)}</style>", 2),
        ('<p style="background:url(a.png)">', 1),
    ],
)
def test_the_check_for_external_resources(text, count):
    assert len(external(text)) == count


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Pages and slides of the committed results: kind -> folder."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("results")
    patch.setenv("RAPO_RESULTS", str(folder))
    assert all(pages.export(kind, "reference") == 0 for kind in pages.KINDS)
    yield {kind: folder / "of_reference" / kind for kind in pages.KINDS}
    patch.undo()


@pytest.fixture(params=pages.KINDS)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("copy", COPIES, ids=lambda p: p.stem)
def test_every_notebook_has_a_page_that_fetches_nothing(exported, kind, copy):
    text = (exported[kind] / f"{copy.stem}.html").read_text(encoding="utf-8")
    assert external(text) == []
    assert "default-src 'none'" in text
    n_scripts = Resources(text).tags.count("script")
    assert n_scripts == (kind == "slides"), "the only script is the one that moves the slides"
    if kind == "slides":
        script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in text


@pytest.mark.parametrize("copy", COPIES, ids=lambda p: p.stem)
def test_pages_hold_all_figures_formulas_and_code(exported, copy):
    nb = nbformat.read(copy, as_version=4)
    text = (exported["html"] / f"{copy.stem}.html").read_text(encoding="utf-8")
    data = [o.data for c in nb.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
    assert text.count("data:image/png;base64,") == sum("image/png" in d and "text/html" not in d for d in data)
    read = re.sub(r'<details class="contents">.*?</details>', "", text, flags=re.DOTALL)  # headings stand there again
    prose = [c.source for c in nb.cells if c.cell_type == "markdown"] + [d.get("text/markdown", "") for d in data]
    assert read.count("<math ") == sum(len(FORMULA.findall(CODE.sub("", p))) for p in prose)
    assert text.count('<div class="code">') == sum(c.cell_type == "code" and bool(c.source) for c in nb.cells)
    tables = sum(d.get("text/html", "").count("<table") for d in data)
    assert text.count("<table") >= tables
    assert "Loading weights" not in text, "a progress bar that is over"


def test_every_figure_and_what_we_saw_are_on_slides(exported):
    for copy in COPIES:
        nb = nbformat.read(copy, as_version=4)
        shown = [c for c in nb.cells if c.cell_type == "code" and not set(c.metadata.tags) & pages.NOT_SHOWN]
        figures = [o for c in shown for o in c.outputs if "image/png" in o.get("data", {})]
        text = (exported["slides"] / f"{copy.stem}.html").read_text(encoding="utf-8")
        assert text.count("data:image/png;base64,") == len(figures)
        assert "<h2>What we saw</h2>" in text and "<h2>Check yourself</h2>" in text
        assert '<section class="slide title" id="1">' in text


def test_the_index_leads_to_all_and_no_link_leads_nowhere(exported, kind):
    out = exported[kind]
    index = Resources((out / "index.html").read_text(encoding="utf-8"))
    assert index.links == [f"{c.stem}.html" for c in COPIES]
    for page in out.glob("*.html"):
        found = Resources(page.read_text(encoding="utf-8"))
        for link in found.links:
            if link.startswith("#"):
                assert link[1:] in found.anchors
            elif "://" not in link:
                assert (out / link.split("#")[0]).exists(), f"{page.name}: {link}"


def test_nothing_to_export_is_said(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path))
    assert runs.main([kind, "--profile", "smoke"]) == 1
    said = capsys.readouterr().err
    assert "run ./run_all.sh --profile smoke first" in said and f"./run_all.sh {kind} --profile reference" in said
    assert not (tmp_path / "smoke" / kind).exists()


def test_a_formula_that_cannot_be_drawn_names_its_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path))
    (tmp_path / "smoke" / "notebooks").mkdir(parents=True)
    nbformat.write(
        new_notebook(cells=[new_markdown_cell(r"$\nosuch$")]), tmp_path / "smoke" / "notebooks" / "01_x.ipynb"
    )
    with pytest.raises(ValueError, match=r"01_x\.ipynb: the formula"):
        pages.export("html", "smoke")


# --------------------------------------------------------------------------------------------- outputs

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({WIDGET: {}, "text/html": "<b>a card</b>", "text/plain": "VBox()"}, "<b>a card</b>"),
        ({WIDGET: {}, "text/plain": "Loading weights:   0%|          | 0/35 [00:00<?, ?it/s]"}, None),
        ({WIDGET: {}, "text/plain": "VBox(<x>)"}, "VBox(&lt;x&gt;)"),
        ({"text/plain": "a < b"}, "<pre>a &lt; b</pre>"),
        ({"text/markdown": "**x** $a$", "text/plain": ""}, "<strong>x</strong> <math"),
        ({"image/png": PNG, "text/plain": "<Figure>"}, f"data:image/png;base64,{PNG}"),
    ],
)
def test_outputs(data, shown):
    made = pages.output_html(new_output("display_data", data), 'an "alt"')
    assert made == "" if shown is None else shown in made
    assert 'alt="an &quot;alt&quot;"' in made or "image/png" not in data


def test_printed_text_is_escaped_and_keeps_its_colours():
    made = pages.output_html(new_output("stream", name="stdout", text="<script>x</script> \x1b[31mred\x1b[0m"))
    assert "<script>" not in made and "&lt;script&gt;" in made and "ansi-red-fg" in made


# ------------------------------------------------------------------------------------- slides and bare

CARD = "# 01 A card\n\n| | |\n|---|---|\n| **Question** | Why $a$? |\n| **Time** | long |\n\nA story."


def example() -> nbformat.NotebookNode:
    figure = new_output("display_data", {"image/png": PNG})
    printed = new_output("stream", text="42")

    def code(source, *tags, outputs=()):
        return new_code_cell(source, metadata={"tags": list(tags)}, outputs=list(outputs), execution_count=1)

    answers = "<details><summary>Answers</summary>\n\n1. Because.\n\n</details>"
    told = "Enough is told here that a slide of its own is worth while, for readers of slides."
    return new_notebook(
        cells=[
            new_markdown_cell(CARD),
            code('profile = "pocket"  # which', "parameters"),
            code('profile = "study"', "injected-parameters"),
            new_markdown_cell(f"## 01.1 First\n{told}"),
            code("x = 1", "idea", outputs=[printed]),
            new_markdown_cell("Look at the bars."),
            code("plot()", "idea", outputs=[figure]),
            new_markdown_cell("And the table."),
            code("table()", "result", outputs=[printed]),
            new_markdown_cell("## What we saw"),
            code("say()", "check", outputs=[printed]),
            new_markdown_cell(
                "## Check yourself\n1. Why is it so, and not otherwise, as everybody would expect at first?\n\n"
                f"{answers}\n\n"
                "## Change one thing\nChange the number of notes, and say first what you expect to see then."
            ),
            code("mine = 2", "exercise", outputs=[printed]),
            new_markdown_cell("<details><summary>Solution</summary>\n\n```python\nmine = 3\n```\n</details>"),
            new_markdown_cell("## Next\n[02](02_b.ipynb)"),
        ]
    )


def test_the_rule_for_slides():
    slides = pages.make_slides(example())
    assert [(s.kind, s.title) for s in slides] == [
        ("title", "01 A card"),
        ("section", "01.1 First"),
        ("figure", "01.1 First"),
        ("result", "01.1 First"),
        ("result", "What we saw"),
        ("questions", "Check yourself"),
        ("section", "Change one thing"),
    ]
    title, _, figure, table, _, questions, _ = slides
    assert "Why <math" in title.body and "A story" not in title.body and "A story" in title.notes
    assert "Look at the bars." in figure.body and PNG in figure.body and "<summary>code</summary>" in figure.body
    assert "42" in table.body
    assert "Because" not in questions.body and "Because" in questions.notes
    assert not any("mine" in s.body for s in slides)


def test_the_lead_of_a_text_keeps_its_formulas():
    text = "a" * 50 + "\n\n" + "b" * 60 + "\n\n$$x$$\n\nc"
    assert pages._lead(text, 100) == "a" * 50 + "\n\n$$x$$"
    assert pages._lead(text, 200) == text
    assert pages._lead("a" * 500, 100) == "a" * 500, "a text begins, however long its first paragraph is"


def test_headings_inside_code_blocks_are_none():
    assert pages.chunks("## A\n```\n# no\n```\ntext") == [pages.Chunk(2, "A", "```\n# no\n```\ntext")]
    assert pages.chunks("plain") == [pages.Chunk(0, "", "plain")] and pages.chunks("") == []


def test_a_bare_notebook():
    bare = pages.bare_notebook(example(), "smoke")
    nbformat.validate(bare)
    assert [c.source for c in bare.cells if c.cell_type == "markdown"] == [
        "# 01 A card\n\nWhy $a$?",
        "## 01.1 First",
        "## What we saw",
        "## Check yourself\n\n1. Why is it so, and not otherwise, as everybody would expect at first?\n\n"
        "## Change one thing\n\nChange the number of notes, and say first what you expect to see then.",
        "## Next",
    ]
    code = [c for c in bare.cells if c.cell_type == "code"]
    assert [c.source for c in code][:2] == ['profile = "smoke"  # which', "x = 1"] and len(code) == 6
    assert all(c.outputs == [] and c.execution_count is None for c in code)
    assert pages.bare_notebook(example()).cells[1].source == 'profile = "pocket"  # which'


def test_the_command_for_bare_notebooks(tmp_path, monkeypatch):
    monkeypatch.setenv("RAPO_RESULTS", str(tmp_path))
    assert runs.main(["bare", "--profile", "smoke"]) == 0
    made = sorted((tmp_path / "bare").glob("*.ipynb"))
    assert [p.name for p in made] == [p.name for p in SOURCES]
    for path, source in zip(made, SOURCES, strict=True):
        bare, whole = nbformat.read(path, as_version=4), nbformat.read(source, as_version=4)
        code = [c.source for c in whole.cells if c.cell_type == "code"]
        code[0] = code[0].replace('profile = "pocket"', 'profile = "smoke"')
        assert [c.source for c in bare.cells if c.cell_type == "code"] == code
        prose = "\n".join(c.source for c in bare.cells if c.cell_type == "markdown")
        assert "<details" not in prose and "Check yourself" in prose and "## Change one thing" in prose
        assert len(prose) < 0.5 * sum(len(c.source) for c in whole.cells if c.cell_type == "markdown")
