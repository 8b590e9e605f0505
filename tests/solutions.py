"""Runs the worked solutions of the notebooks' exercises: `python tests/solutions.py [--profile smoke] [--only 00,04]`.

A solution stands in a folded markdown cell, where no kernel runs it. This command makes copies of the notebooks with
each solution as a code cell behind its exercise, executes them, and prints what the solutions say. Runs that they need
are trained, so in other profiles than smoke it takes as long as the notebooks do.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import nbformat

from rapo_lib.driver import NOTEBOOKS, NotebookFailed, execute_notebook, select_notebooks

FOLDED = re.compile(r"<details><summary>Solution</summary>\n\n(.*?)\n</details>", re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def solutions(cell: nbformat.NotebookNode) -> list[str]:
    """The code of the folded solutions of a cell, one text a solution; empty when it has none."""
    if cell.cell_type != "markdown":
        return []
    return ["\n".join(CODE.findall(text)) for text in FOLDED.findall(cell.source)]


def with_solutions(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy with each solution as a code cell behind the cell that holds it."""
    nb, cells = nbformat.from_dict(nb), []
    for cell in nb.cells:
        cells.append(cell)
        for code in filter(None, solutions(cell)):
            cells.append(nbformat.v4.new_code_cell(code, metadata={"tags": ["solution"]}))
    nb.cells = cells
    return nb


def said(nb: nbformat.NotebookNode) -> str:
    """What the solutions of an executed copy wrote."""
    lines = []
    for cell in nb.cells:
        if "solution" in cell.metadata.get("tags", []):
            lines.append(f"--- {cell.source.splitlines()[0]}")
            for out in cell.outputs:
                lines.append(out.get("text") or out.get("data", {}).get("text/plain", ""))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/solutions.py", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--only", default="", help="numbers such as 00,04")
    chosen = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for path in select_notebooks([x for x in chosen.only.split(",") if x], NOTEBOOKS):
            copy = Path(folder) / path.name
            nbformat.write(with_solutions(nbformat.read(path, as_version=4)), copy)
            print(f"== {path.stem}", flush=True)
            try:
                done = execute_notebook(copy, Path(folder) / f"{path.stem}.done.ipynb", {"profile": chosen.profile})
                print(said(done), flush=True)
            except NotebookFailed as e:
                failed += 1
                print(e, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
