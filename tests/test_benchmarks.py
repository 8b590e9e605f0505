"""Public question sets by name: one hand-made row each in the set's own columns, read from files."""

from __future__ import annotations

import base64
import hashlib
import re
import warnings
from collections import Counter

import pytest

from rapo_lib import benchmarks as b
from rapo_lib import facts
from rapo_lib.rewards import answers_equal
from rapo_lib.tasks import SPLITS, check_disjoint, load_verl_questions, mend_escapes
from rapo_lib.traces import save_jsonl


def hidden(text, canary):
    key = hashlib.sha256(canary.encode()).digest()
    return base64.b64encode(bytes(c ^ key[i % 32] for i, c in enumerate(text.encode()))).decode()


NESTED = "So $x=\\frac{1}{2}$, and the answer is $\\boxed{\\frac{1}{\\sqrt{2}}}$."
HOTPOT = {"id": "dev_0", "question": "Who?", "golden_answers": ["Ada", "Ada", "A. L."], "metadata": {"type": "bridge"}}
#: Set -> (file of the hub's split, row, answers, a key of info).
ROWS = {
    "gsm8k": (
        "test",
        {"question": "How many?", "answer": "1,000 + 2 = <<1000+2=1002>>1,002\n#### 1,002"},
        ("1002",),
        "solution",
    ),
    "math": (
        "test",
        {"problem": "x?", "level": "Level 5", "type": "Algebra", "solution": NESTED},
        (r"\frac{1}{\sqrt{2}}",),
        "level",
    ),
    "math500": ("test", {"problem": "x?", "solution": NESTED, "answer": "3", "subject": "Algebra"}, ("3",), "subject"),
    "aime24": ("train", {"id": 60, "problem": "n?", "answer": "033", "url": "u", "year": "2024"}, ("33",), "year"),
    "aime25": ("test", {"problem": "n?", "answer": "70", "id": "0"}, ("70",), "id"),
    "hotpotqa": ("dev", HOTPOT, ("Ada", "A. L."), "type"),
    "2wikimultihopqa": ("dev", HOTPOT, ("Ada", "A. L."), "type"),
    "musique": ("dev", HOTPOT, ("Ada", "A. L."), "type"),
    "bamboogle": ("test", HOTPOT | {"golden_answers": ["yes"]}, ("yes",), "type"),
    "webwalkerqa": (
        "main",
        {"question": "When?", "answer": "May 1", "root_url": "https://x.org/", "info": {"hop": "single-source"}},
        ("May 1",),
        "hop",
    ),
    "simpleqa": ("test", {"metadata": "{'topic': 'Art'}", "problem": "Who?", "answer": "Ada"}, ("Ada",), "metadata"),
    "gaia": (
        "validation",
        {"task_id": "t", "Question": "How?", "Level": "1", "Final answer": "17", "file_name": "", "file_path": ""},
        ("17",),
        "Level",
    ),
    "browsecomp": (
        "test",
        {"problem": hidden("Which café?", "c1"), "answer": hidden("Ölüdeniz", "c1"), "canary": "c1"}
        | {"problem_topic": "Art"},
        ("Ölüdeniz",),
        "problem_topic",
    ),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def local(tmp_path, split, *rows):
    folder = tmp_path / "copy"
    folder.mkdir(exist_ok=True)
    save_jsonl(folder / f"{split}.jsonl", rows)
    return folder


def test_every_set_of_the_paper_is_there():
    assert set(ROWS) == set(b.BENCHMARKS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_set_becomes_a_question(name, tmp_path):
    hub_split, row, answers, key = ROWS[name]
    questions, report = b.read_benchmark(name, "test", local(tmp_path, hub_split, row))
    (q,) = questions
    assert q.answers == answers and q.split == "test" and q.family == b.BENCHMARKS[name].family and key in q.info
    assert q.text in ("Who?", "How many?", "x?", "n?", "When?", "How?", "Which café?")
    assert str(report) == f"{name}, test: 1 of 1 rows are questions"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gsm8k", {"answer": "1002"}, "no #### before the answer"),
        ("math", {"solution": "no box"}, "no boxed answer in the solution"),
        ("aime24", {"answer": "1/2"}, "an answer that is no integer from 0 to 999"),
        ("hotpotqa", {"golden_answers": []}, "no gold answer"),
        ("musique", {"answerable": False}, "not answerable from its paragraphs"),
        ("gaia", {"file_name": "a.xlsx"}, "needs a file"),
        ("gaia", {"Final answer": "?"}, "its answer is not public"),
        ("browsecomp", {"canary": "other"}, "does not decrypt with its canary"),
        ("simpleqa", {"problem": " "}, "no question or problem"),
    ],
)
def test_a_row_that_is_no_question_is_left_out_and_counted(name, change, reason, tmp_path):
    hub_split, row, *_ = ROWS[name]
    good = {
        k: (f"{v}" if k in ("question", "problem", "Question") and name != "browsecomp" else v) for k, v in row.items()
    }
    folder = local(tmp_path, hub_split, good, row | change)
    if name == "musique":  # both rows need the column
        folder = local(tmp_path, hub_split, good | {"answerable": True}, row | change)
    with pytest.warns(UserWarning, match=re.escape(f"{name}, test: 1 of 2 rows are questions; 1 left out ({reason})")):
        assert len(b.load_benchmark(name, "test", folder)) == 1


def test_validation_questions_are_kept_out_of_training_for_good(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(400)]
    folder = local(tmp_path, "train", *rows)
    train, validation = (b.load_benchmark("gsm8k", s, folder) for s in ("train", "validation"))
    assert len(train) + len(validation) == 400 and 8 <= len(validation) <= 35
    check_disjoint(train, validation)
    local(tmp_path, "train", *rows[::-1])  # another order changes no question's side
    assert {q.text for q in b.load_benchmark("gsm8k", "validation", folder)} == {q.text for q in validation}
    assert len(b.load_benchmark("gsm8k", "train", folder, limit=7)) == 7


def test_the_same_question_twice_is_kept_once(tmp_path):
    row = ROWS["aime25"][1]
    with pytest.warns(UserWarning, match="1 of 2 rows are questions; 1 left out .the same text as an earlier one"):
        b.load_benchmark("aime25", "test", local(tmp_path, "test", row, row))


def test_what_cannot_be_loaded_says_what_came_and_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="unknown question set 'gsm9k'; allowed: gsm8k, .*, world, a folder"):
        b.load_benchmark("gsm9k", "train")
    with pytest.raises(ValueError, match="unknown split 'dev'; allowed: train, validation, test"):
        b.load_benchmark("gsm8k", "dev")
    with pytest.raises(ValueError, match="aime24 has no train questions; it has test"):
        b.load_benchmark("aime24", "train")
    with pytest.raises(
        ValueError, match=r"cannot load gaia from '.*gone', split 'validation': .*HF_TOKEN.*folder='..'"
    ):
        b.load_benchmark("gaia", "test", tmp_path / "gone")


def test_a_folder_of_files_is_a_set(tmp_path):
    save_jsonl(tmp_path / "train.jsonl", [{"id": "a", "text": "6 * 7?", "answer": "42"}])
    assert b.load_benchmark(str(tmp_path), "train")[0].answer == "42"
    with pytest.raises(ValueError, match=r"test.jsonl does not exist"):
        b.load_benchmark(str(tmp_path), "test")


# ------------------------------------------------------------------------------------------- verl


def verl(path, *rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def verl_row(content, gold, **more):
    prompt = [{"role": "system", "content": "Put it in \x08oxed{}."}, {"role": "user", "content": content}]
    return {"data_source": "x", "prompt": prompt, "ability": "math", "reward_model": {"ground_truth": gold}} | more


def test_backspaces_in_place_of_backslashes_are_mended_and_reported(tmp_path):
    path = verl(tmp_path / "train.parquet", verl_row("Use \x08oxed{} and 2 \times 3.", "\x0crac{1}{2}"))
    with pytest.warns(UserWarning, match="1 of 1 rows repaired .control characters where a backslash"):
        (q,) = load_verl_questions(path, "train")
    assert q.text == r"Use \boxed{} and 2 \times 3." and q.answer == r"\frac{1}{2}"
    questions, report = b.read_benchmark(str(tmp_path), "train")
    assert questions == [q] and report.repaired.total() == 1
    verl(path, verl_row("A table:\n1\t2\r\n3\ttextile", "6"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_verl_questions(path)[0].text == "A table:\n1\t2\r\n3\ttextile"


def test_what_is_mended_and_what_is_not():
    assert mend_escapes("\x08egin \x0corall \x0bec \x07lpha") == r"\begin \forall \vec \alpha"
    assert mend_escapes("\text{a} \right) \rangle") == r"\text{a} \right) \rangle"
    assert mend_escapes("a\tb \r\n \tthe") == "a\tb \r\n \tthe"


# ------------------------------------------------------------------------------------- sets made here


@pytest.mark.parametrize("name", b.MADE)
def test_splits_of_sets_made_here_share_no_question(name):
    if name == "gsm_symbolic":
        pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    found = {s: b.read_benchmark(name, s)[0] for s in SPLITS}
    assert all(len(q) >= 100 for q in found.values())
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        check_disjoint(found[one], found[other])
    assert b.read_benchmark(name, "train")[0] == found["train"]


def test_templates_of_gsm_symbolic_are_split_and_the_bad_ones_left_out():
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    templates = {s: {q.info["template"] for q in b.read_benchmark("gsm_symbolic", s)[0]} for s in SPLITS}
    assert not templates["train"] & (templates["validation"] | templates["test"])
    assert not templates["validation"] & templates["test"] and not b.BAD_TEMPLATES & set.union(*templates.values())
    for q in b.read_benchmark("gsm_symbolic", "test")[0]:
        last = re.findall(r"-?[\d,]*\.?\d+", q.info["solution"])[-1]
        assert answers_equal(last.replace(",", ""), q.answer), q


@pytest.mark.parametrize(
    ("worked", "gold", "fault"),
    [("so 4\n#### 4", "4", ""), ("so 1,204.", "1204", ""), ("#### 4", "5", "its worked"), ("-3", "-3", "a negative")],
)
def test_a_worked_solution_must_give_its_gold_answer(worked, gold, fault):
    assert b._solution_fault(worked, gold).startswith(fault) and bool(b._solution_fault(worked, gold)) == bool(fault)


def test_every_question_about_the_world_is_answered_by_the_documents_its_search_finds():
    """Follows the hops of each question with the real search tool, from titles that the documents before give."""
    tools = b.make_toolbox("world", "test")
    known = {c.name: c for c in facts.load_countries().values()}
    kinds = Counter()
    for q in b.read_benchmark("world", "test")[0]:
        texts = [r.text for r in tools.run([("search", f"country {title}") for title in q.info["documents"]])]
        for title, text in zip(q.info["documents"], texts, strict=True):
            assert f"The capital of {title} is {known[title].capital}." in text
        kinds[q.info["kind"]] += 1
        if q.info["kind"] in ("currency", "highest", "largest", "between"):
            assert any(q.answer in t for t in texts), q
        if q.info["kind"] == "areas":
            assert (
                str(sum(int(re.search(r"area is (\d+) km2", known_text(t))[1]) for t in q.info["documents"]))
                == q.answer
            )
    assert set(kinds) == {"currency", "highest", "neighbours", "largest", "between", "areas"}


def known_text(title):
    return next(d["text"] for d in facts.load_facts_documents() if d["title"] == title)


def test_facts_of_one_country_by_hand():
    austria = facts.load_countries()["AUT"]
    assert (austria.capital, austria.currency, austria.highest, austria.height) == (
        "Vienna",
        "EUR",
        "Grossglockner",
        3798,
    )
    assert len(austria.borders) == 8 and "borders Czech Republic" in known_text("Austria")
    assert "<" not in known_text("Austria") and "&" not in known_text("Austria")


def test_the_capital_asks_for_the_country_and_not_for_its_namesake():
    asked = [q.text for s in SPLITS for q in b.read_benchmark("world", s)[0] if q.info["kind"] == "currency"]
    assert len(asked) == len(set(asked))


# ------------------------------------------------------------------------------------------ tools


def test_each_set_gets_its_tools():
    assert b.make_toolbox("gsm8k", "train").names == ("python",)
    with pytest.raises(ValueError, match="hotpotqa needs a search: set search to the address .* rapo_lib.serve"):
        b.make_toolbox("hotpotqa", "test")
    assert b.tools_needed("webwalkerqa") == ("search", "python") and b.tools_needed("world") == ("search", "python")
