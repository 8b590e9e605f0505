"""Questions: loaders name what is wrong, and evaluation never meets a buffer question."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rapo_lib.tasks import Question, check_disjoint, load_pocket_questions, load_questions, load_verl_questions
from rapo_lib.traces import save_jsonl

ROW = {"id": "q1", "text": "capital of Mora?", "answer": "Lumiro"}


def write(tmp_path, *rows):
    save_jsonl(tmp_path / "frågor.jsonl", rows)
    return tmp_path / "frågor.jsonl"


def test_rows_become_questions(tmp_path):
    full = ROW | {"id": "q2", "answer": ["a", "b"], "family": "web", "split": "test"}
    full |= {"max_steps": 4, "info": {"n_hard": 1}}
    first, second = load_questions(write(tmp_path, ROW, full))
    assert first == Question("q1", "capital of Mora?", "Lumiro") and first.answers == ("Lumiro",)
    assert second.answers == ("a", "b") and second.max_steps == 4 and second.info["n_hard"] == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "q", "text": "t"}, "row 2, column answer: missing"),
        (ROW | {"id": 3}, "row 2, column id: 3 is int, expected str"),
        (ROW | {"id": "q1"}, "row 2, column id: 'q1' stands twice"),
        (ROW | {"id": "q", "answer": ""}, "row 2, column answer: '' is empty"),
        (ROW | {"id": "q", "answer": []}, r"row 2, column answer: \[\] is empty"),
        (ROW | {"id": "q", "answer": [1]}, r"row 2, column answer: \[1\] is empty or holds"),
        (ROW | {"id": "q", "max_steps": "4"}, "row 2, column max_steps: '4' is str, expected int or null"),
        (ROW | {"id": "q", "max_steps": 0}, "row 2, column max_steps: 0; at least 1"),
        (ROW | {"id": "q", "max_steps": True}, "row 2, column max_steps: True is bool"),
        (ROW | {"id": "q", "anwser": "x"}, "row 2, column anwser: unknown; allowed: id, text, answer"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, message):
    path = write(tmp_path, ROW, row)
    with pytest.raises(ValueError, match=message) as error:
        load_questions(path)
    assert path.name in str(error.value)


def test_an_empty_file_and_a_damaged_one_are_named(tmp_path):
    with pytest.raises(ValueError, match="holds no questions"):
        load_questions(write(tmp_path))
    (tmp_path / "x.jsonl").write_text(json.dumps(ROW) + '\n{"id": "q2", "te', encoding="utf-8")
    with pytest.raises(ValueError, match="x.jsonl, line 2: not JSON"):
        load_questions(tmp_path / "x.jsonl")


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(ValueError, match="unknown regime 'hard'; allowed: exploration, halfway, easy"):
        load_pocket_questions("hard", "train")
    with pytest.raises(ValueError, match="unknown split 'dev'; allowed: train, validation, test"):
        load_pocket_questions("easy", "dev")


def test_verl_parquet(tmp_path):
    row = {
        "data_source": "nq",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "capital of Mora?"}],
        "reward_model": {"style": "rule", "ground_truth": ["Lumiro", "lumiro"]},
        "extra_info": {"index": 7},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (question,) = load_verl_questions(tmp_path / "a.parquet", "train")
    assert question == Question("nq-7", "capital of Mora?", ("Lumiro", "lumiro"), split="train", info={"index": 7})
    pq.write_table(pa.Table.from_pylist([{"prompt": row["prompt"]}]), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="b.parquet: not verl format: no column reward_model; it has prompt"):
        load_verl_questions(tmp_path / "b.parquet")


@pytest.mark.case(30)
def test_evaluation_on_buffer_questions_is_refused():
    questions = [Question(f"t{i}", f"what is {i}?", str(i)) for i in range(4)]
    check_disjoint(["train-1", "what was 0?"], questions)
    with pytest.raises(ValueError, match="2 of 4 evaluation questions are in the step-trace buffer .*t0.*t2"):
        check_disjoint(["t0", "What  is 2?"], questions)
    with pytest.raises(ValueError, match="1 of 4"):
        check_disjoint([Question("other-id", "what is 3?", "3")], questions)
