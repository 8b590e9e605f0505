"""The guides: every example runs and does what its text says, every word, message, link and number is there."""

from __future__ import annotations

import ast
import doctest
import functools
import html.parser
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest

from rapo_lib.config import ROOT
from rapo_lib.docs import draw_rollout, example_rollout, external_resources, main, modules, write_api
from rapo_lib.plots import TEXT_CHARS, plot_rollout, to_hex
from rapo_lib.show import AUTHORS
from rapo_lib.traces import Rollout, Segment

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "notebooks" / "README.md"]
TABLES = ROOT / "results" / "reference" / "tables"


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def sections(text: str, level: int = 2) -> dict[str, str]:
    """{heading: text below it} for one level of headings; what stands before the first has an empty heading."""
    head, *rest = re.split(rf"^{'#' * level} ", text, flags=re.MULTILINE)
    return {"": head} | {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1] for part in rest}


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


# ------------------------------------------------------------------------------------------ add your own

EXTEND = sections(read(DOCS / "extend.md"))


def run(blocks: list[str], start: dict[str, Any]) -> dict[str, Any]:
    names = dict(start)
    for block in blocks:
        exec(compile(block, "docs/extend.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def beginning() -> dict[str, Any]:
    """What the examples share; the policy, which one example adapts, is loaded anew for each."""
    (block,) = python_blocks(EXTEND[""])
    return run([block], {})


@pytest.fixture
def example(beginning, tmp_path, monkeypatch):
    """`example("A task")` runs the blocks of a section in an empty folder and gives their names."""
    monkeypatch.chdir(tmp_path)

    def use(heading: str) -> dict[str, Any]:
        policy = beginning["load_policy"](beginning["config"].student)
        return run(python_blocks(EXTEND[heading]), beginning | {"policy": policy})

    return use


def test_the_five_things_one_may_add_have_an_example_of_about_twenty_lines():
    assert list(EXTEND)[1:] == ["A task", "A tool", "An encoder", "A teacher", "A method"]
    for heading, text in list(EXTEND.items())[1:]:
        for block in python_blocks(text):
            n = sum(bool(line.strip()) for line in block.splitlines())
            assert n <= 25, f"{heading}: {n} lines"


def test_own_task_is_loaded_answered_and_scored_by_the_own_reward(example):
    names = example("A task")
    table = names["table"]
    assert [q.id for q in names["questions"]] == ["a", "b"] and len(table) == 16
    assert names["questions"][1].answers == ("Rorine", "Binire")
    assert table.groupby("question_id")["correct"].mean().min() > 0.25  # the student can do this one
    policy, questions, wiki = names["policy"], names["questions"], names["wiki"]
    request = [names["RolloutRequest"](questions[0], i) for i in range(8)]
    rollouts = names["sample_rollouts"](policy, request, wiki, limits=names["limits"], seed=0).rollouts
    scores = [names["half_for_format"](r, questions[0], policy.protocol) for r in rollouts]
    plain = [names["pocket_reward"](r, questions[0], policy.protocol) for r in rollouts]
    assert set(scores) <= {0.0, 0.5, 1.0} and all(a >= b for a, b in zip(scores, plain, strict=True))
    wrong = questions[0].__class__("a", questions[0].text, "Roropu", max_steps=2)
    right = rollouts[scores.index(1.0)]
    assert names["half_for_format"](right, wrong, policy.protocol) == 0.5


def test_own_tool_is_called_by_the_student_and_counted(example):
    names = example("A tool")
    counts = names["mine"].counts["search"]
    assert counts.calls == len(names["rollout"].tool_calls) > 0 and counts.failures == 0
    text = names["policy"].protocol.decode(names["rollout"].completion_ids)
    assert "Vunamo" in text and "Nelive" in text
    with pytest.raises(RuntimeError, match="the glossary is empty"):
        names["Toolbox"]([names["Glossary"]({})])
    assert not names["mine"].run([("search", "nothing like it")])[0].ok
    broken = names["Glossary"]({"x": "y"})
    broken.run = lambda queries: 1 / 0
    (result,) = names["Toolbox"]([broken]).run([("search", "x")])
    assert not result.ok and "ZeroDivisionError" in result.error


def test_own_encoder_finds_each_key_again_also_after_saving(example):
    names = example("An encoder")
    traces, again = names["traces"], names["again"]
    keys = list(dict.fromkeys(t.key for t in traces))[:200]
    found = [hits[0] for hits in again.search(keys, k=1)]
    assert [traces[hit.trace_id].key for hit in found] == keys and min(hit.score for hit in found) > 0.9999
    with pytest.raises(ValueError, match="use the same or build it again"):
        names["StepTraceBuffer"].load("buffer", importlib.import_module("rapo_lib.buffer").TfidfEncoder())
    coin, policy = names["coin"], names["policy"]
    asking = [names["RolloutRequest"](q, hybrid=True) for q in names["train"][:4]]
    how = dict(limits=names["limits"], seed=0, retriever=names["retriever"], when_to_retrieve=coin(1.0))
    names["sample_rollouts"](policy, asking, names["toolbox"], **how)
    assert names["retriever"].counts["inserted"] > 0


def test_own_teachers_rollouts_become_notes_that_hybrid_rollouts_get(example):
    names = example("A teacher")
    written, notes = names["written"], names["notes"]
    right = {r.question_id for r in written if r.reward == 1.0}
    assert set(notes.buffer.question_ids) == right and {t.reward for t in notes.buffer.traces} == {1.0}
    assert {t.teacher for t in notes.buffer.traces} == {"my"}
    inserted = sum(len(r.retrievals) for r in names["hybrid"].rollouts)
    assert inserted == notes.counts["inserted"] > 0
    (by_hand,) = names["by_hand"].buffer.traces
    assert by_hand.value == names["second"] and by_hand.teacher == "import"
    asking = [names["RolloutRequest"](names["question"], i, hybrid=True) for i in range(4)]
    how = dict(limits=names["limits"], seed=0, retriever=names["by_hand"], when_to_retrieve=names["coin"](1.0))
    names["sample_rollouts"](names["policy"], asking, names["toolbox"], **how)
    assert names["by_hand"].counts["inserted"] > 0


@pytest.mark.filterwarnings("ignore")
def test_own_method_trains_one_rl_step_with_its_own_reward(example):
    names = example("A method")
    (row,) = names["metrics"]
    assert row["rl_step"] == 1 and np.isfinite(row["reward"])
    assert names["method"].retrieval_reward is names["plain_fall"]
    from rapo_lib.objective import rollout_retrieval_reward

    rollouts = [r for r in names["trainer"]._rollouts if r.retrievals]
    mine = [rollout_retrieval_reward(r, names["plain_fall"]) for r in rollouts]
    assert rollouts and row["retrieval_reward"] == pytest.approx(np.mean(mine))
    assert row["retrieval_reward"] != pytest.approx(np.mean([rollout_retrieval_reward(r) for r in rollouts]))
    moved = [p.abs().max().item() for n, p in names["student"].model.named_parameters() if "lora_B" in n]
    assert row["groups_no_signal_frac"] == 1.0 or max(moved) > 0


# ---------------------------------------------------------------------------------------------- glossary


def glossary() -> list[list[str]]:
    rows = [line for line in read(DOCS / "glossary.md").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def resolve(name: str) -> Any:
    """What `module.name.name` or `module.NAME["key"]` of the library is; a field of a dataclass counts as its own."""
    name, _, key = name.removesuffix('"]').partition('["')
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(["rapo_lib", *parts[:n]]))
            break
        except ModuleNotFoundError:
            continue
    else:
        raise ModuleNotFoundError(name)
    for part in parts[n:]:
        thing = (
            thing.__dataclass_fields__[part]
            if part in getattr(thing, "__dataclass_fields__", ())
            else getattr(thing, part)
        )
    return thing[key] if key else thing


def test_glossary_is_in_alphabetical_order_and_explains_each_word_once():
    words = [re.sub(r"[^a-z0-9 ]", "", row[0].split(", ")[0].lower()) for row in glossary()]
    assert words == sorted(words) and len(set(words)) == len(words) >= 60
    for word, meaning, *_ in glossary():
        assert meaning.endswith(".") and len(meaning.split()) >= 4, word


@pytest.mark.parametrize("row", glossary(), ids=lambda row: row[0].replace("`", ""))
def test_what_the_glossary_names_is_in_the_library_and_its_place_in_a_notebook(row):
    assert len(row) == 4, row
    for name in re.findall(r"`([^`]+)`", row[2]):
        resolve(name)
    section, notebook = re.fullmatch(r"\[(\d\d\.\d+)\]\(\.\./notebooks/(.+)\)", row[3]).groups()
    assert notebook.startswith(section[:2]) and section in headings_of(notebook), row[3]


@pytest.mark.parametrize("name", ["config.RunConfig.lr", "objective.nothing", 'methods.METHODS["rappo"]', "nomodule.x"])
def test_a_name_that_is_not_there_is_noticed(name):
    with pytest.raises((AttributeError, KeyError, ModuleNotFoundError)):
        resolve(name)


@functools.cache
def headings_of(notebook: str) -> dict[str, str]:
    """{"05.2": "One RL step, ..."} of a notebook."""
    cells = nbformat.read(ROOT / "notebooks" / notebook, as_version=4).cells
    text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    return dict(re.findall(r"^#+ (\d\d\.\d+) (.+)$", text, flags=re.MULTILINE))


# --------------------------------------------------------------------------------------- troubleshooting


def template(node: ast.expr) -> str | None:
    """A string expression with `…` for each part that is not known before it runs."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(v) or "…" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or "…") + (template(node.right) or "…")
    return None


@functools.cache
def messages() -> list[str]:
    """Every string that the library or run_all.sh could say, docstrings left out."""
    found = [line.replace('"', "") for line in read(ROOT / "run_all.sh").splitlines() if not line.startswith("#")]
    for path in (ROOT / "rapo_lib").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(read(path))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        said = (template(n) for n in nodes if isinstance(n, ast.expr) and id(n) not in docstrings)
        found += filter(None, said)
    return found


def is_said(message: str) -> bool:
    """Whether all known parts of a message stand, in this order, in one string of the source."""
    parts = [re.escape(part) for part in re.split(r"\s*…\s*", message) if part.strip(" ;:,.()[]")]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return bool(parts) and any(pattern.search(text) for text in messages())


QUOTED = re.findall(r"^### `(.+)`$", read(DOCS / "troubleshooting.md"), flags=re.MULTILINE)


@pytest.mark.parametrize("message", QUOTED)
def test_each_quoted_message_is_one_that_the_source_says(message):
    assert is_said(message)


def test_there_are_messages_each_with_a_cause_and_a_remedy():
    assert len(QUOTED) == len(set(QUOTED)) >= 40
    for heading, text in list(sections(read(DOCS / "troubleshooting.md"), 3).items())[1:]:
        assert text.count("**Why.**") == text.count("**Do.**") == 1, heading


@pytest.mark.parametrize("message", ["unknown profile …; permitted: …", "the buffer … is hungry", "…: …"])
def test_a_message_that_nothing_says_is_noticed(message):
    assert not is_said(message)


# ------------------------------------------------------------------------------------- links and numbers


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"```.*?```", "", read(path), flags=re.DOTALL)
    return re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_links_lead_to_files_and_sections_that_exist(page):
    for text, target in links(page):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: [{text}]({target})"
        if anchor:
            there = [slug(h) for h in re.findall(r"^#+ (.+)$", read(file), flags=re.MULTILINE)]
            assert anchor in there, f"{page.name}: [{text}]({target})"
        if re.fullmatch(r"\d\d\.\d+", text):
            assert text in headings_of(file.name), f"{page.name}: [{text}]({target})"


#: A result: a percentage, or a signed number of points.
RESULT = re.compile(r"\d\s?%|\d points?\b|\bpass@1 of \d|\d times\b")


def quotes(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """(line, numbers in backticks, tables of the reference that the line links to) of each line with a result."""
    for line in read(path).splitlines():
        tables = [t.rsplit("/", 1)[1] for _, t in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", line) if "/tables/" in t]
        if tables or RESULT.search(re.sub(r"\]\([^)]*\)", "", line)):
            yield line, re.findall(r"`([^`]+)`", line), tables


def test_each_number_of_the_presenters_guide_stands_in_the_table_that_it_names():
    n = 0
    for line, quoted, tables in quotes(ROOT / "notebooks" / "README.md"):
        assert tables, f"a number without its table: {line}"
        assert not RESULT.search(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)), f"a number outside backticks: {line}"
        known = "\n".join(read(TABLES / t) for t in tables)
        for number in quoted:
            assert number in known, f"{number!r} is not in {', '.join(tables)}: {line}"
        n += len(quoted)
    assert n >= 15


# ----------------------------------------------------------------------------------- README's picture


def test_the_picture_shows_every_step_on_its_authors_ground_and_nothing_else():
    rollout, question, protocol = example_rollout()
    assert rollout.hybrid and rollout.reward == 1.0 and rollout.retrievals
    ax = plot_rollout(rollout, protocol, question.text)
    words = [t.get_text() for t in ax.texts]
    assert words[0] == question.text
    shown = "".join("".join(words).split())
    for segment in rollout.segments:
        for word in protocol.decode(segment.ids).split():
            assert word in shown
    assert words.count("retrieved") == 1 + len(rollout.retrievals)  # the legend names it once more
    grounds = {to_hex(p.get_facecolor()) for p in ax.patches if p.get_fill()}
    assert grounds == {colour for colour, _ in AUTHORS.values()}
    assert sum(not p.get_fill() for p in ax.patches) == len(rollout.retrievals)
    assert f"{rollout.step_entropies[0]:.3f} nats" in words


def test_long_texts_are_wrapped_and_hostile_ones_are_text(tiny_tokenizer):
    protocol = importlib.import_module("rapo_lib.traces").Protocol(tiny_tokenizer)
    text = "$x_{1$ \u202e " + "word " * 60 + "x" * 200
    ids = protocol.encode(text)
    ax = plot_rollout(Rollout("q", (1,), [Segment("policy", ids, (0.0,) * len(ids), (0.5,) * len(ids))]), protocol)
    ax.figure.canvas.draw()  # a formula would not parse
    pieces = [t.get_text() for t in ax.texts if t.get_color() == "#111111"]
    assert "".join(pieces).count("word ") == 60 and "".join(pieces).endswith("x" * 200)
    assert max(map(len, pieces)) <= TEXT_CHARS and "[U+202E]" in pieces[0]
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_rollout(Rollout("q", (1,)), protocol)


def test_readmes_picture_is_drawn_by_the_command(tmp_path):
    draw_rollout(tmp_path / "rollout.png")
    made, shown = (plt.imread(p) for p in (tmp_path / "rollout.png", DOCS / "rollout.png"))
    assert made.shape == shown.shape and np.abs(made - shown).mean() < 0.01


# --------------------------------------------------------------------------------------------- API pages


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "pages"
    folder.mkdir()
    (folder / "old.html").write_text("of an earlier call", encoding="utf-8")
    write_api(folder)
    return folder


def test_each_public_module_has_a_page_with_its_functions(api):
    pages = {p.relative_to(api).with_suffix("").as_posix().replace("/", ".") for p in api.rglob("*.html")}
    assert pages == {"index", *modules()} and len(pages) > 35
    page = read(api / "rapo_lib" / "objective.html")
    assert 'id="rapo_advantage"' in page and "<code>A = (1 + a A_ret) A_acc</code>" in page
    assert 'id="sample_rollouts"' in read(api / "rapo_lib" / "rollout.html")


def test_each_argument_has_a_line_of_its_own(api):
    page = read(api / "rapo_lib" / "hybrids.html").split('id="sample_groups"')[1]
    arguments = re.findall(r"<li><strong>(.+?):</strong>", page.split("Returns")[0].split("</ul>")[0])
    assert arguments[:4] == ["policy", "questions", "toolbox", "retriever"]
    result = doctest.testmod(importlib.import_module("rapo_lib.docs"))
    assert result.attempted >= 3 and not result.failed


class Fetches(html.parser.HTMLParser):
    """What a browser fetches when it opens a page, read another way than the module does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if tag != "a" and name in ("src", "href", "srcset", "data", "poster") and value:
                self.found.append(value)


def test_no_page_fetches_anything_from_elsewhere_or_tells_where_it_was_made(api):
    for page in api.rglob("*.html"):
        reader = Fetches()
        reader.feed(read(page))
        for address in reader.found:
            assert not re.match(r"(https?:)?//", address), f"{page.name}: {address}"
            if not address.startswith(("data:", "#")):
                assert (page.parent / address).exists(), f"{page.name}: {address}"
    for file in (p for p in api.rglob("*") if p.is_file()):
        assert str(ROOT) not in read(file), file.name


@pytest.mark.parametrize(
    ("page", "fetched"),
    [
        ('<link rel="stylesheet" href="//fonts.org/x.css">', ["//fonts.org/x.css"]),
        ("<style>@font-face { src: url('https://f.org/a.woff') }</style>", ["https://f.org/a.woff"]),
        ('<script type="module">import m from "https://cdn.org/m.mjs"</script>', ["https://cdn.org/m.mjs"]),
        ("<img alt='x' src=http://h.org/i.png>", ["http://h.org/i.png"]),
        ('<a href="https://pdoc.dev">made by</a> <code>"https://x.org"</code>', []),
        ('<script src="search.js"></script><img src="data:image/png;base64,AA//BB">', []),
    ],
)
def test_what_a_browser_would_fetch(page, fetched):
    assert external_resources(page) == fetched


def test_without_pdoc_the_command_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "pdoc", None)
    assert main(["--out", str(tmp_path / "api")]) == 1
    assert "pip install pdoc" in capsys.readouterr().err and os.listdir(tmp_path) == []
