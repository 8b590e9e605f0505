"""API pages: `python -m rapo_lib.docs` writes one HTML page a module into results/api, from the docstrings.

`python -m rapo_lib.docs --figure docs/rollout.png` draws the hybrid rollout that README shows.

docs/ holds the guides for readers (glossary, troubleshooting, examples of extensions); these pages are for looking
up a function. They are made by pdoc, which is an extra, and read without a network: scripts, styles and the search
index lie in the pages, formulas are plain symbols, and nothing is fetched. This is checked before they are moved to
their place.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rapo_lib.config import DATA, ROOT
from rapo_lib.reference import REFERENCE
from rapo_lib.runs import results_folder
from rapo_lib.traces import Protocol, Rollout, load_jsonl

if TYPE_CHECKING:
    from rapo_lib.tasks import Question

#: What a browser fetches by itself. A link that one has to click (`<a href>`) is none.
_FETCHED = re.compile(
    r"""(?:<(?!a\b)[a-z][^>]*?\s(?:src|srcset|href|data|poster)\s*=\s*["']?\s*"""
    r"""|url\(\s*["']?|@import\s+["']|\bfrom\s+["']|\bimport\s*\(?\s*["']|\bfetch\(\s*["'])"""
    r"""((?:https?:)?//[^"'\s)>]+)""",
    re.IGNORECASE,
)


def modules() -> list[str]:
    """Dotted names of the library's modules, packages first, in alphabetical order.

    Example:
        >>> [name for name in modules() if name.startswith("rapo_lib.pocket")][:2]
        ['rapo_lib.pocket', 'rapo_lib.pocket.build']
    """
    files = (p.relative_to(ROOT).with_suffix("") for p in (ROOT / "rapo_lib").rglob("*.py"))
    names = (".".join(p.parts).removesuffix(".__init__") for p in files)
    return sorted(n for n in names if not n.endswith("__main__"))


def external_resources(page: str) -> list[str]:
    """Addresses that a browser would fetch from elsewhere when it opens a page.

    Example:
        >>> external_resources('<script src="https://cdn.org/a.js"></script><a href="https://arxiv.org">paper</a>')
        ['https://cdn.org/a.js']
    """
    return [m[1] for m in _FETCHED.finditer(page)]


#: A section of arguments, and the place in it where a line goes on with the next argument.
_ARGUMENTS = re.compile(r"^(?:Args|Attributes):\n(?:[ \t]+.*(?:\n|$))+", re.MULTILINE)
_NEXT = re.compile(r"(?<=\.)[ ](?=[a-z_]\w*(?:, [a-z_]\w*)*: )")


def one_argument_a_line(docstring: str) -> str:
    """A docstring in which each argument begins a line, as pdoc reads them; the source may put several into one.

    Example:
        >>> print(one_argument_a_line("Args:\\n    x: a number. y, z: two more. It is so: no split."))
        Args:
            x: a number.
            y, z: two more. It is so: no split.
    """
    return _ARGUMENTS.sub(lambda m: _NEXT.sub("\n    ", m[0]), docstring)


def write_api(folder: Path | str) -> list[Path]:
    """Write the API pages of the library.

    Args:
        folder: where they go; pages of an earlier call are replaced as a whole.

    Returns:
        The pages, one a module, and index.html.

    Raises:
        ImportError: pdoc is not installed.
        RuntimeError: a page would fetch something from elsewhere.
    """
    try:
        import pdoc
        from jinja2 import pass_context
        from pdoc.render import configure, env
    except ImportError:
        raise ImportError(
            'the API pages are made by pdoc, an optional extra: run pip install -e ".[docs]", or pip install pdoc'
        ) from None
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    configure(docformat="google", footer_text="rapo")
    plain = env.filters["to_markdown"]
    split = pass_context(lambda context, docstring: plain(context, one_argument_a_line(docstring)))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as made:
        env.filters["to_markdown"] = split
        try:
            pdoc.pdoc("rapo_lib", output_directory=Path(made))
        finally:
            env.filters["to_markdown"] = plain
        for page in (p for p in Path(made).rglob("*") if p.suffix in (".html", ".js")):
            # A default value that is a path would tell where the repository lies.
            text = page.read_text(encoding="utf-8").replace(f"{ROOT}/", "").replace(str(ROOT), ".")
            if page.suffix == ".html" and (foreign := external_resources(text)):
                raise RuntimeError(f"{page.name} would fetch {foreign[0]}; API pages are read without a network")
            page.write_text(text, encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(made, folder)
    return sorted(folder.rglob("*.html"))


def example_rollout() -> tuple[Rollout, Question, Protocol]:
    """The first stored hybrid rollout of the reference run of RAPO that is right and holds an own hard step."""
    from rapo_lib.evaluate import call_results
    from rapo_lib.pocket.world import SKILLS
    from rapo_lib.policy import load_tokenizer
    from rapo_lib.tasks import load_pocket_questions

    protocol = Protocol(load_tokenizer(DATA / "pocket" / "tokenizer"))
    questions = {q.id: q for q in load_pocket_questions("exploration", "train")}
    (path,) = (REFERENCE / "runs" / "training" / "rapo").glob("seed0-*/rollouts.jsonl")
    for row in load_jsonl(path):
        rollout = Rollout.from_dict(row["rollout"])
        if rollout.retrievals and rollout.reward == 1.0:
            question = questions[rollout.question_id]
            if any(SKILLS[skill].hard and right for skill, right in call_results(rollout, question, protocol)):
                return rollout, question, protocol
    raise ValueError(f"{path} holds no right hybrid rollout with an own hard step; run notebook 05 in profile study")


def draw_rollout(path: Path | str) -> None:
    """Write the picture of `example_rollout` as PNG."""
    from rapo_lib.plots import plot_rollout, save_figure

    rollout, question, protocol = example_rollout()
    save_figure(plot_rollout(rollout, protocol, question.text).figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m rapo_lib.docs [--out FOLDER] [--figure PATH]`; 1 when the extra is missing."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.docs", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the pages (default: results/api)")
    parser.add_argument("--figure", type=Path, help="draw README's rollout into this PNG, and make no pages")
    chosen = parser.parse_args(arguments)
    if chosen.figure:
        draw_rollout(chosen.figure)
        return 0
    folder = chosen.out or results_folder() / "api"
    try:
        pages = write_api(folder)
    except ImportError as e:
        print(e, file=sys.stderr)
        return 1
    print(f"{len(pages)} pages; open {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
