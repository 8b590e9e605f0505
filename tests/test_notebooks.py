"""Source notebooks: parameters, no outputs, short cells, no typed results, and only functions that exist."""

import ast
import builtins
import importlib
import re

import nbformat
import pytest
from solutions import solutions, with_solutions

from rapo_lib.config import ROOT
from rapo_lib.driver import declared_parameters

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TAGS = {"parameters", "setup", "idea", "result", "check", "exercise"}
#: A percentage or a measured duration in prose is a result unless its line says where it comes from.
RESULT = re.compile(r"\d+(?:\.\d+)?\s*(?:%|percent\b|points?\b)|\bpass@1\s*(?:of|is|=|:)\s*\d", re.IGNORECASE)
SOURCED = re.compile(
    r"arXiv|paper|interval|Eq\.|Fig\.|Table|probability|confidence|design|by definition|at most|at least|\{",
    re.IGNORECASE,
)
PATHS = re.compile(r"(?<![\w.:/])/(?:root|home|work|tmp|Users|mnt|content|farm)/|[A-Z]:\\\\")
INSTALLS = re.compile(r"^\s*[!%]\s*(?:pip|conda|mamba|apt)|notebook_login|login\(|subprocess.*\bpip\b", re.MULTILINE)


def test_there_are_no_or_all_notebooks():
    assert not NOTEBOOKS or len(NOTEBOOKS) >= 9, [p.name for p in NOTEBOOKS]
    assert not NOTEBOOKS or NOTEBOOKS[-1].stem == "99_report"


@pytest.fixture(params=NOTEBOOKS, ids=lambda p: p.stem)
def nb(request) -> nbformat.NotebookNode:
    return nbformat.read(request.param, as_version=4)


def code(nb) -> list:
    return [c for c in nb.cells if c.cell_type == "code"]


@pytest.mark.case(40)
def test_valid_with_unique_ids_and_kernel_python3(nb):
    nbformat.validate(nb)
    ids = [c.id for c in nb.cells]
    assert len(set(ids)) == len(ids)
    assert nb.metadata.kernelspec.name == "python3" and nb.metadata.kernelspec.language == "python"
    assert "widgets" not in nb.metadata and "papermill" not in nb.metadata and "rapo" not in nb.metadata


@pytest.mark.case(40)
def test_one_parameters_cell_that_takes_the_profile(nb):
    assert "profile" in declared_parameters(nb)
    first = code(nb)[0]
    assert "parameters" in first.metadata.tags, "the parameters cell comes before other code"


@pytest.mark.case(40)
def test_no_outputs_and_no_counts(nb):
    for cell in code(nb):
        assert cell.outputs == [] and cell.execution_count is None
        assert not set(cell.metadata) - {"tags"}, f"cell metadata: {sorted(cell.metadata)}"


def test_cells_are_short_tagged_and_introduced(nb):
    for i, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        assert len(cell.source.splitlines()) <= 25, cell.source.splitlines()[0]
        tags = set(cell.metadata.get("tags", []))
        assert tags and tags <= TAGS, f"tags {sorted(tags)} of: {cell.source.splitlines()[0]}"
        assert cell.source.strip(), "an empty code cell"
        introduced = i and nb.cells[i - 1].cell_type == "markdown"
        assert introduced or "setup" in tags, f"no markdown before: {cell.source.splitlines()[0]}"


def test_code_parses_and_keeps_to_the_rules(nb):
    for cell in code(nb):
        tree = ast.parse(cell.source)
        for node in ast.walk(tree):
            assert not isinstance(node, ast.ClassDef), f"class {getattr(node, 'name', '')} belongs into rapo_lib"
            assert not (isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names)), "star import"
            assert not (isinstance(node, ast.If) and isinstance(node.test, ast.Constant)), "if with a constant"
        assert not INSTALLS.search(cell.source), cell.source


def test_no_absolute_paths(nb):
    for cell in nb.cells:
        assert not PATHS.search(cell.source), PATHS.search(cell.source)


@pytest.mark.case(41)
def test_prose_holds_no_result_numbers(nb):
    for cell in nb.cells:
        if cell.cell_type == "markdown" and "Check yourself" not in cell.source:  # answers are sums, not results
            for line in re.sub(r"```.*?```|`[^`]*`|\$[^$]*\$", "", cell.source, flags=re.DOTALL).splitlines():
                assert not RESULT.search(line) or SOURCED.search(line), f"made from data, not typed: {line}"


def library_names(nb) -> dict[str, str]:
    """Names that the notebook imports from the library, as dotted paths."""
    found = {}
    for cell in code(nb):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rapo_lib"):
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            if isinstance(node, ast.Import):
                found |= {a.asname: a.name for a in node.names if a.asname and a.name.startswith("rapo_lib")}
    return found


def resolve(path: str):
    """The object that a dotted path names; the longest importable part is the module."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for name in parts[n:]:
            thing = getattr(thing, name)
        return thing
    raise ModuleNotFoundError(path)


def test_imports_and_shown_sources_exist(nb):
    names = library_names(nb)
    for path in names.values():
        resolve(path)
    for cell in code(nb):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("show_source"):
                root, *rest = ast.unparse(node.args[0]).split(".")
                assert root in names, f"show_source({root}): not imported from rapo_lib"
                assert callable(resolve(".".join([names[root], *rest])))


def test_check_yourself_has_as_many_answers_as_questions_and_folds_them(nb):
    (cell,) = [c for c in nb.cells if c.cell_type == "markdown" and "## Check yourself" in c.source]
    part = cell.source.split("## Check yourself")[1].split("\n## ")[0]
    asked, _, rest = part.partition("<details><summary>Answers</summary>\n\n")
    answered, end, _ = rest.partition("\n</details>")
    numbers = [re.findall(r"^(\d+)\. ", text, flags=re.MULTILINE) for text in (asked, answered)]
    assert end and numbers[0] == numbers[1] == [str(n + 1) for n in range(len(numbers[0]))] and len(numbers[0]) >= 3
    assert asked.count("?") >= len(numbers[0]) - 1


def test_change_one_thing_has_exercises_each_with_a_folded_solution(nb):
    (at,) = [i for i, c in enumerate(nb.cells) if c.cell_type == "markdown" and "## Change one thing" in c.source]
    exercises = [i for i, c in enumerate(nb.cells) if "exercise" in c.metadata.get("tags", [])]
    assert exercises and min(exercises) == at + 1, "the exercises stand below their heading"
    for i in exercises:
        prompt = nb.cells[i - 1].source.split("## Change one thing")[-1].strip()
        assert re.match(r"\*\*[^*]+[.?]\*\* ", prompt), f"an exercise has a name: {prompt[:60]}"
        (code,) = solutions(nb.cells[i + 1]) or [""]
        assert code.strip(), f"no folded solution behind: {nb.cells[i].source.splitlines()[0]}"
        explained = re.sub(r"```.*?```|</?(?:details|summary)>|Solution", "", nb.cells[i + 1].source, flags=re.DOTALL)
        assert len(explained.split()) >= 15, "a solution says what one sees and why"


def test_a_solution_runs_where_it_stands_as_far_as_its_names_tell(nb):
    known = set(dir(builtins))
    for cell in code(with_solutions(nb)):
        tree = ast.parse(cell.source)
        if "solution" in cell.metadata.tags:
            assert not unknown_names(tree, known), cell.source
        known |= bound_names(tree)


def bound_names(tree: ast.AST) -> set[str]:
    """Every name that the code binds somewhere: assigned, imported, defined, or an argument."""
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    imports = (a for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names)
    return names | {(a.asname or a.name).split(".")[0] for a in imports}


def unknown_names(tree: ast.AST, known: set[str]) -> set[str]:
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return read - known - bound_names(tree)


def test_a_name_that_a_solution_lacks_is_noticed():
    assert unknown_names(ast.parse("[f(x) for x in rows]; y = 1; y"), {"rows"}) == {"f"}


@pytest.mark.case(41)
@pytest.mark.parametrize(
    ("line", "is_result"),
    [
        ("RAPO reaches 49 % after 35 steps.", True),
        ("It gains 20 points.", True),
        ("The paper reports 47.0 points (arXiv 2603.03078, Table 1).", False),
        ("A 95 % interval over seeds.", False),
        ("Each group holds sixteen rollouts.", False),
    ],
)
def test_the_heuristic_for_typed_results(line, is_result):
    assert bool(RESULT.search(line) and not SOURCED.search(line)) == is_result


@pytest.mark.parametrize(
    ("text", "bad"),
    [("/home/me/x", True), ("data/pocket/x", False), ("https://x.org/home/y", False), ("a/tmp/b", False)],
)
def test_the_pattern_for_absolute_paths(text, bad):
    assert bool(PATHS.search(text)) == bad
