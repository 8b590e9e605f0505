"""What is read from disk: nothing is unpickled, nothing foreign is run, and what is damaged is named."""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from rapo_lib import tasks, tools
from rapo_lib.buffer import StepTraceBuffer, import_traces_jsonl
from rapo_lib.config import ROOT
from rapo_lib.evaluate import evaluate
from rapo_lib.pocket import files
from rapo_lib.pocket.files import POCKET, SUMS, checked, verify_checksums
from rapo_lib.policy import ADAPTER_FILES, BASE_FILE, add_lora, load_adapter, load_policy, load_tokenizer, save_adapter
from rapo_lib.rollout import SamplingLimits
from rapo_lib.tasks import (
    load_pocket_questions,
    load_questions,
    load_verl_questions,
    make_questions,
)
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import Rollout, StepTrace, load_rollouts, save_jsonl, save_rollouts

# --------------------------------------------------------------------------------------- no pickle, no foreign code

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
#: Calls that unpickle whatever they are given.
FORBIDDEN = {
    "torch.load",
    "torch.save",
    "pd.read_pickle",
    "pandas.read_pickle",
    "to_pickle",
    "yaml.load",
    "yaml.unsafe_load",
}
#: Calls that load a model, a tokenizer or data by name, and may run code that comes with them when they are told to.
HUB = ("from_pretrained", "load_dataset", "from_config")


def sources() -> list[tuple[str, str]]:
    """(name, code) of the library and of the notebooks' code cells; lines for IPython alone are left out."""
    found = [(str(p.relative_to(ROOT)), p.read_text(encoding="utf-8")) for p in (ROOT / "rapo_lib").rglob("*.py")]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for n, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code":
                lines = ["" if line.lstrip()[:1] in ("%", "!") else line for line in cell.source.splitlines()]
                found.append((f"{path.name}, cell {n}", "\n".join(lines)))
    return found


def faults(code: str) -> list[str]:
    """What a piece of code does that loading must not do."""
    out = []
    for node in ast.walk(ast.parse(code)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        out += [f"imports {n}" for n in names if n.split(".")[0] in PICKLES]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
        if name in FORBIDDEN or name.rpartition(".")[2] in FORBIDDEN:
            out.append(f"calls {name}")
        if keywords.get("allow_pickle", "False") != "False":
            out.append(f"{name} with allow_pickle")
        if keywords.get("trust_remote_code", "False") != "False":
            out.append(f"{name} with trust_remote_code")
        if name.endswith("ForCausalLM.from_pretrained") and keywords.get("use_safetensors") != "True":
            out.append(f"{name} without use_safetensors=True")
    return out


#: The pocket build starts a model from the one that it has just written itself; GGUF, too, holds numbers alone.
OWN = {
    "rapo_lib/pocket/train.py": ["Qwen3ForCausalLM.from_pretrained without use_safetensors=True"],
    "rapo_lib/local_models.py": ["AutoModelForCausalLM.from_pretrained without use_safetensors=True"],
}


def test_no_code_unpickles_or_trusts_code_that_comes_with_a_model():
    found = {name: f for name, code in sources() if (f := faults(code))}
    assert found == OWN
    assert len(sources()) > 100


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "import os, dill as d",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "pd.read_pickle(path)",
        "frame.to_pickle(path)",
        "yaml.load(text)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
        "AutoModelForCausalLM.from_pretrained(name)",
    ],
)
def test_the_search_finds_each_of_them(code):
    assert len(faults(code)) == 1


def test_loading_unpickles_nothing(tmp_path, tiny_policy):
    """In a process of its own, since an audit hook stays: policy, adapter, questions, buffer, trajectories."""
    save_adapter(add_lora(load_policy(POCKET / "models" / "student", device="cpu"), 4, 0), tmp_path / "adapter")
    StepTraceBuffer.build([StepTrace(f"q{i}\n", "<search> a</search>", f"q{i}") for i in range(3)]).save(tmp_path / "b")
    pq.write_table(pa.Table.from_pylist([VERL]), tmp_path / "v.parquet")
    code = """
import sys
events = []
sys.addaudithook(lambda event, args: events.append(args) if event == "pickle.find_class" else None)
from pathlib import Path
from rapo_lib.buffer import StepTraceBuffer
from rapo_lib.pocket.files import POCKET
from rapo_lib.policy import load_adapter, load_policy, load_tokenizer
from rapo_lib.reference import REFERENCE
from rapo_lib.tasks import load_pocket_questions, load_verl_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import load_jsonl, load_rollouts
import pandas as pd
folder = Path(sys.argv[1])
load_adapter(load_policy(POCKET / "models" / "student", device="cpu"), folder / "adapter")
load_tokenizer(POCKET / "tokenizer")
load_pocket_questions("easy", "test")
load_verl_questions(folder / "v.parquet")
load_rollouts(POCKET / "trajectories" / "weak_easy.jsonl")
StepTraceBuffer.load(folder / "b")
make_pocket_toolbox("test")
run = next((REFERENCE / "runs").glob("training/grpo/seed0*"))
pd.read_parquet(run / "metrics.parquet")
list(load_jsonl(run / "rollouts.jsonl"))
assert events == [], events
import pickle
pickle.loads(pickle.dumps(Path))
assert len(events) == 1, "the hook does not see what it should"
print("nothing unpickled")
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], env=env, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0 and "nothing unpickled" in done.stdout, done.stderr[-2000:]


# ------------------------------------------------------------------------------------------------- shipped files


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Path:
    """A copy of data/pocket/ that may be damaged; each test mends what it broke."""
    return Path(shutil.copytree(POCKET, tmp_path_factory.mktemp("data") / "pocket"))


@pytest.fixture
def copy(shipped, monkeypatch) -> Path:
    for module in (files, tasks, tools):
        monkeypatch.setattr(module, "POCKET", shipped)
    yield shipped


def reader(root: Path, name: str):
    """How the package reads a shipped file."""
    folder, _, rest = name.partition("/")
    if folder == "models":
        return lambda: load_policy(root / folder / rest.split("/")[0], device="cpu")
    if folder == "tokenizer":
        return lambda: load_tokenizer(root / folder)
    if folder == "questions":
        return lambda: load_pocket_questions(*rest.removesuffix(".jsonl").split("_"))
    if folder == "trajectories":
        return lambda: load_rollouts(checked(root / name))
    split = rest.split("_")[0] if folder == "wiki" else "train"
    return lambda: make_pocket_toolbox(split)


SHIPPED = sorted(json.loads((POCKET / SUMS).read_text(encoding="utf-8")))


def test_the_sums_cover_every_file():
    assert SHIPPED == sorted(
        p.relative_to(POCKET).as_posix() for p in POCKET.rglob("*") if p.is_file() and p.name != SUMS
    )


def damages(path: Path, root: Path) -> dict[str, bytes | None]:
    data = path.read_bytes()
    beside = [p for p in sorted(path.parent.iterdir()) if p.is_file() and p.name not in (path.name, SUMS)]
    sibling = beside[0] if beside else root / "tokenizer" / "tokenizer.json"
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return {"cut": data[:middle], "empty": b"", "flipped": flipped, "swapped": sibling.read_bytes(), "removed": None}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_damaged_shipped_file_is_named_by_what_reads_it(copy, name):
    path, read = copy / name, reader(copy, name)
    whole = path.read_bytes()
    for kind, data in damages(path, copy).items():
        path.unlink() if data is None else path.write_bytes(data)
        try:
            with pytest.raises(ValueError) as error:
                read()
            # Without its config.json a folder is no model folder: that is said first.
            lost = kind == "removed" and path.name == "config.json"
            want = "holds no config.json" if lost else f"{path}: sha256 is "
            assert want in str(error.value), (kind, str(error.value))
            assert lost or f", expected {SUMS_OF[name]}; restore" in str(error.value)
            assert ("(that of " in str(error.value)) == (kind == "swapped")
        finally:
            path.write_bytes(whole)
    with pytest.raises(ValueError, match="that belong there"):
        checked(path.with_name("another_" + path.name))


SUMS_OF = json.loads((POCKET / SUMS).read_text(encoding="utf-8"))


def test_the_whole_copies_are_read_again(copy):
    verify_checksums(copy)
    for name in ("models/weak/config.json", "tokenizer/tokenizer.json", "questions/easy_test.jsonl"):
        reader(copy, name)()


@pytest.mark.parametrize(
    "extra",
    [
        "models/student/pytorch_model.bin",
        "models/student/adapter_config.json",
        "tokenizer/vocab.json",
        "wiki/x.jsonl",
        "x",
    ],
)
def test_a_file_that_does_not_belong_there_is_named(copy, extra):
    path = copy / extra
    path.write_text("{}", encoding="utf-8")
    try:
        readers = [lambda: verify_checksums(copy), lambda: checked(copy)]
        if extra.startswith(("models", "tokenizer")):  # all files of these folders are read
            readers.append(reader(copy, extra))
        for read in readers:
            with pytest.raises(ValueError, match=f"{path} is there, but no such file is expected; remove it"):
                read()
    finally:
        path.unlink()


def test_hidden_files_and_caches_do_not_count(copy):
    for name in (".DS_Store", "wiki/.ipynb_checkpoints/a.jsonl", "__pycache__/python_prelude.pyc"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(b"x")
    verify_checksums(copy)
    (copy / ".DS_Store").unlink()
    shutil.rmtree(copy / "wiki" / ".ipynb_checkpoints")
    shutil.rmtree(copy / "__pycache__")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "checksums.json is missing: the files beside it cannot be checked; restore"),
        ("", "checksums.json is damaged: expected JSON"),
        ('{"a": "b', "checksums.json is damaged: expected JSON"),
        ("[]", r"checksums.json is damaged: expected an object of paths and sums, found \[\]"),
        ("{}", "checksums.json is damaged: expected an object"),
        ('{"a": 3}', "checksums.json is damaged: a has 3, expected 64 hex digits"),
        ('{"a": "0g"}', "checksums.json is damaged: a has '0g', expected 64 hex digits"),
    ],
)
def test_damaged_sums_are_named(copy, text, message):
    whole = (copy / SUMS).read_bytes()
    (copy / SUMS).unlink() if text is None else (copy / SUMS).write_text(text, encoding="utf-8")
    try:
        with pytest.raises(ValueError, match=message):
            load_pocket_questions("easy", "test")
    finally:
        (copy / SUMS).write_bytes(whole)


def test_the_check_cannot_be_walked_around(copy, tmp_path, monkeypatch):
    """By a relative path, a link, `..`, or a name that begins like another."""
    path = copy / "questions" / "easy_test.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    (tmp_path / "link").symlink_to(copy)
    monkeypatch.chdir(copy.parent)
    try:
        around = copy / "wiki" / ".." / "questions" / path.name
        for way in (Path("pocket/questions") / path.name, tmp_path / "link" / "questions" / path.name, around):
            with pytest.raises(ValueError, match="easy_test.jsonl: sha256 is"):
                checked(way)
    finally:
        path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"models/stud is none of the files that belong there"):
        checked(copy / "models" / "stud")
    with pytest.raises(
        ValueError, match=r"expert_easy.jsonl is none of .*teacher_easy.jsonl.*keep files of your own els"
    ):
        checked(copy / "trajectories" / "expert_easy.jsonl")
    assert checked(tmp_path / "anything") == tmp_path / "anything"


# ------------------------------------------------------------------------------------------ a user's own models


@pytest.fixture
def folder(tmp_path, tiny_policy) -> Path:
    tiny_policy.base.save_pretrained(tmp_path / "model")
    tiny_policy.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def only_a_pickle(folder: Path) -> None:
    torch.save({"x": torch.zeros(2)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


FULL = ["full_attention"]
FOREIGN = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: cut(d / "model.safetensors"), "model.safetensors is damaged: expected a complete safetensors file"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors is damaged: expected a complete saf"),
        (only_a_pickle, "weights are in pytorch_model.bin, which would have to be unpickled; model.safetensors is exp"),
        (lambda d: (d / "model.safetensors").unlink(), "it holds no weights; model.safetensors is expected"),
        (lambda d: cut(d / "config.json"), "config.json is damaged: expected JSON"),
        (lambda d: cut(d / "generation_config.json"), "generation_config.json is damaged: expected JSON"),
        (lambda d: cut(d / "tokenizer_config.json"), "tokenizer_config.json is damaged: expected JSON"),
        (lambda d: cut(d / "tokenizer.json"), "tokenizer.json is damaged: expected JSON"),
        (
            lambda d: (d / "config.json").write_text("[1]", encoding="utf-8"),
            "config.json is damaged: expected a JSON object, found list",
        ),
        (lambda d: (d / "tokenizer.json").unlink(), "holds no complete model"),
        (lambda d: (d / "chat_template.jinja").unlink(), "the tokenizer has no chat template"),
        (lambda d: (d / "chat_template.jinja").write_text("{% for", encoding="utf-8"), "the chat template is damaged"),
        (
            lambda d: (d / "chat_template.jinja").write_text("hello", encoding="utf-8"),
            "the chat template leaves the question out",
        ),
        (lambda d: edit(d / "config.json", model_type="xx"), "model type `xx`"),
        (
            lambda d: edit(d / "config.json", num_hidden_layers=3, layer_types=FULL * 3),
            r"do not fit config.json, which describes a Qwen3ForCausalLM: 11 weights are missing \(first: model.lay",
        ),
        (
            lambda d: edit(d / "config.json", num_hidden_layers=1, layer_types=FULL),
            r"do not fit config.json.*: 11 are there that it does not have \(first: model.layers.1",
        ),
        (
            lambda d: edit(d / "config.json", model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
            "describes a Qwen2ForCausalLM: 6 weights are missing .*bias.*; 4 are there that it does not have .*k_norm",
        ),
        (
            lambda d: edit(d / "config.json", intermediate_size=24),
            r"6 have another shape \(first: model.layers.0.mlp.down_proj.weight, \[32, 48\], expected \[32, 24\]\)",
        ),
        (lambda d: edit(d / "config.json", tie_word_embeddings=False), r"1 weights are missing \(first: lm_head"),
        (lambda d: (d / "adapter_config.json").write_text("{}", encoding="utf-8"), "holds an adapter beside the model"),
        (
            lambda d: edit(d / "config.json", model_type="x", auto_map=FOREIGN),
            "contains custom code",
        ),
    ],
)  # fmt: skip
def test_a_model_that_is_damaged_or_put_together_from_two_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_policy(folder, device="cpu")
    assert str(folder) in str(error.value)


def test_code_in_a_model_folder_is_never_run(folder):
    (folder / "evil.py").write_text("open('ran', 'w')\nraise SystemExit(3)", encoding="utf-8")
    edit(folder / "config.json", model_type="x", auto_map=FOREIGN)
    with pytest.raises(ValueError, match="custom code"):
        load_policy(folder, device="cpu")
    assert not Path("ran").exists()


def test_a_tokenizer_of_another_model_is_refused(folder, tiny_policy):
    small = tiny_policy.base.config.to_dict() | {"vocab_size": 100, "eos_token_id": 5}
    Qwen3ForCausalLM(Qwen3Config(**small)).save_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"tokenizer gives a prompt the id \d+, the model has 100 embeddings \(0 to 99\)"
    ):
        load_policy(folder, device="cpu")


def test_a_path_to_a_file_is_no_model(folder):
    with pytest.raises(ValueError, match="config.json is a file; pass the folder"):
        load_policy(folder / "config.json")


def test_a_healthy_folder_loads_the_very_weights(folder, tiny_policy):
    loaded = load_policy(folder, device="cpu")
    pairs = zip(loaded.base.parameters(), tiny_policy.base.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_tokenizer_folder_without_its_files_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} holds no complete tokenizer"):
        load_tokenizer(tmp_path)


def saved_adapter(tmp_path, folder, rank=4) -> Path:
    save_adapter(add_lora(load_policy(folder, device="cpu"), rank, 0), tmp_path / f"adapter{rank}")
    return tmp_path / f"adapter{rank}"


def with_new_sums(adapter: Path) -> None:
    """As if the damage had been there when it was saved."""
    import hashlib

    edit(adapter / BASE_FILE, sha256={n: hashlib.sha256((adapter / n).read_bytes()).hexdigest() for n in ADAPTER_FILES})


def test_a_damaged_adapter_is_named_and_leaves_the_policy_as_it_was(tmp_path, folder):
    adapter, policy = saved_adapter(tmp_path, folder), load_policy(folder, device="cpu")
    for name in ADAPTER_FILES:
        whole = (adapter / name).read_bytes()
        for data in (whole[:-1], whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1]), b"", None):
            (adapter / name).unlink() if data is None else (adapter / name).write_bytes(data)
            found = "missing" if data is None else "[0-9a-f]{64}"
            with pytest.raises(ValueError, match=f"{adapter / name}: sha256 is {found}, expected [0-9a-f]{{64}}; copy"):
                load_adapter(policy, adapter)
        (adapter / name).write_bytes(whole)
    (adapter / BASE_FILE).write_text('{"name": "x"}', encoding="utf-8")
    with pytest.raises(ValueError, match=f"{BASE_FILE} lacks checksum: damaged, or written by an older version"):
        load_adapter(policy, adapter)
    cut(adapter / BASE_FILE)
    with pytest.raises(ValueError, match=f"{BASE_FILE} is damaged: expected JSON"):
        load_adapter(policy, adapter)
    assert not any("lora" in name for name, _ in policy.model.named_parameters())


def test_an_adapter_of_another_rank_names_both(tmp_path, folder):
    adapter, other = saved_adapter(tmp_path, folder), saved_adapter(tmp_path, folder, 8)
    shutil.copy(other / ADAPTER_FILES[1], adapter / ADAPTER_FILES[1])
    policy = load_policy(folder, device="cpu")
    with pytest.raises(ValueError, match="adapter_model.safetensors: sha256 is"):
        load_adapter(policy, adapter)
    with_new_sums(adapter)
    with pytest.raises(ValueError, match=r"has rank 4 by adapter_config.json, but \S+lora_A\S* has rank 8"):
        load_adapter(policy, adapter)
    (adapter / ADAPTER_FILES[1]).write_bytes(b"no safetensors")
    with_new_sums(adapter)
    with pytest.raises(ValueError, match="adapter_model.safetensors is damaged: expected a complete safetensors file"):
        load_adapter(policy, adapter)


def test_an_adapter_that_is_a_pickle_is_refused(tmp_path, folder):
    adapter = saved_adapter(tmp_path, folder)
    torch.save({}, adapter / "adapter_model.bin")
    (adapter / ADAPTER_FILES[1]).unlink()
    with pytest.raises(ValueError, match="adapter_model.safetensors: sha256 is missing"):
        load_adapter(load_policy(folder, device="cpu"), adapter)


# ---------------------------------------------------------------------------------------------- a user's own data

ROW = {"id": "q1", "text": "capital of Mora?", "answer": "Lumiro"}
VERL = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "capital of Mora?"}],
    "reward_model": {"style": "rule", "ground_truth": "Lumiro"},
    "extra_info": {"index": 7},
}


@pytest.mark.parametrize("load", [load_questions, load_verl_questions])
def test_a_path_that_is_no_file_with_content_is_refused(tmp_path, load):
    (tmp_path / "empty").write_bytes(b"")
    for path, message in (
        (tmp_path / "gone", "gone does not exist; expected a"),
        (tmp_path, " is a folder; expected a"),
        (tmp_path / "empty", "empty is empty and holds no questions; expected a"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path)
        with pytest.raises(ValueError, match=message):
            load(str(path))


def test_jsonl_in_another_encoding_or_depth_is_refused_and_crlf_is_read(tmp_path):
    path, line = tmp_path / "q.jsonl", json.dumps(ROW)
    for data, message in (
        (b"\xef\xbb\xbf" + line.encode(), "q.jsonl begins with a byte-order mark; save it as UTF-8 without one"),
        (line.encode("utf-16"), "q.jsonl begins with a byte-order mark"),
        (line.replace("Lumiro", "Lumír").encode("latin-1"), None),
        ('{"id": "é"}'.encode("latin-1"), r"q.jsonl, line 1: not JSON .'utf-8' codec .* position 8"),
        (b'{"a": ' + b"[" * 100_000, "q.jsonl"),
        (b"[1]\n", r"q.jsonl, line 1: holds list"),
        (line.encode() + b"\n\n", "q.jsonl, line 2: not JSON"),
    ):
        path.write_bytes(data)
        if message:
            with pytest.raises(ValueError, match=message):
                load_questions(path)
    path.write_bytes(line.encode() + b"\r\n" + json.dumps(ROW | {"id": "q2"}).encode() + b"\r\n")
    assert [q.id for q in load_questions(path)] == ["q1", "q2"] and load_questions(path)[0].answer == "Lumiro"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "row 1: 'text' is str, expected a mapping with id, text, answer"),
        (ROW | {"text": "half \ud800"}, "row 1, column text: holds a broken character"),
        (ROW | {"answer": ["a", 3]}, "row 1, column answer: .* holds something that is no text"),
        (ROW | {"answer": math.nan}, "row 1, column answer: nan is float, expected str or list"),
        (ROW | {"max_steps": 4.0}, "row 1, column max_steps: 4.0 is float, expected int or null"),
        (ROW | {"info": "x"}, "row 1, column info: 'x' is str, expected dict"),
    ],
)
def test_rows_of_wrong_or_mixed_types_are_named(row, message):
    with pytest.raises(ValueError, match=message):
        make_questions([row], "rows")


def parquet(path: Path, *rows) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize(
    ("gold", "want"),
    [
        ("Lumiro", ("Lumiro",)),
        (42, ("42",)),
        (0.5, ("0.5",)),
        (["a", "b"], ("a", "b")),
        ({"target": ["a", "b"]}, ("a", "b")),
        ({"target": "a"}, ("a",)),
    ],
)
def test_verl_ground_truths_that_are_read(tmp_path, gold, want):
    path = parquet(tmp_path / "v.parquet", VERL | {"reward_model": {"ground_truth": gold}})
    assert load_verl_questions(path)[0].answers == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"reward_model": {"ground_truth": None}},
            "ground_truth: None is NoneType; expected text, a number, or a list",
        ),
        ({"reward_model": {"ground_truth": math.nan}}, "ground_truth: nan is float"),
        ({"reward_model": {"ground_truth": True}}, "ground_truth: True is bool"),
        ({"reward_model": {"ground_truth": {"a": "b"}}}, "ground_truth: {'a': 'b'} is dict"),
        ({"reward_model": {"ground_truth": [["a"]]}}, "ground_truth: .* holds lists"),
        ({"reward_model": {"ground_truth": b"a"}}, "ground_truth: b'a' is bytes"),
        ({"reward_model": {"style": "rule"}}, "row 1: not verl format .*ground_truth"),
        ({"reward_model": "rule"}, "row 1: not verl format"),
        ({"prompt": "capital of Mora?"}, "row 1: not verl format .*a list of role and content"),
        (
            {"prompt": [{"role": "system", "content": "s"}]},
            "column prompt: expected a message of role user whose content is text",
        ),
        (
            {"prompt": [{"role": "user", "content": None}]},
            "column prompt: expected a message of role user whose content is text",
        ),
        ({"extra_info": "x"}, "column extra_info: 'x' is str, expected fields or null"),
    ],
)
def test_verl_rows_that_are_something_else_are_named(tmp_path, change, message):
    path = parquet(tmp_path / "v.parquet", VERL | change)
    with pytest.raises(ValueError, match=message) as error:
        load_verl_questions(path)
    assert "v.parquet, row 1" in str(error.value)


def test_verl_files_with_other_columns_no_rows_or_an_id_twice_are_named(tmp_path):
    path = parquet(tmp_path / "v.parquet", {"question": "a", "answer": "b"})
    with pytest.raises(ValueError, match="v.parquet: not verl format: no column prompt; it has question, answer"):
        load_verl_questions(path)
    pq.write_table(pa.Table.from_pylist([VERL]).slice(0, 0), path)
    with pytest.raises(ValueError, match="v.parquet holds no questions"):
        load_verl_questions(path)
    with pytest.warns(UserWarning, match="v.parquet: 2 of 2 rows repaired .ids that were not unique"):
        assert [q.id for q in load_verl_questions(parquet(path, VERL, VERL))] == ["v-1", "v-2"]


def test_a_parquet_cut_at_any_byte_is_refused(tmp_path):
    path = tmp_path / "v.parquet"
    small = pa.Table.from_pylist([{k: VERL[k] for k in ("prompt", "reward_model")}])
    pq.write_table(small, path, write_statistics=False, store_schema=False, use_dictionary=False)
    whole = path.read_bytes()
    assert len(load_verl_questions(path)) == 1
    for n in range(1, len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match="v.parquet is no complete parquet file"):
            load_verl_questions(path)


def test_a_safetensors_file_cut_at_any_byte_is_refused(tmp_path, folder):
    from safetensors.torch import save_file

    from rapo_lib.policy import _read_shapes

    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3, 2), "b": torch.ones(4)}, path)
    whole = path.read_bytes()
    assert _read_shapes(path) == {"a": (3, 2), "b": (4,)}
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match="x.safetensors is damaged"):
            _read_shapes(path)


def load_traces(path: Path) -> list:
    return import_traces_jsonl(path)


LOADERS = {
    "questions": (load_questions, [ROW | {"id": f"q{i}", "info": {"n": i, "x": [1.5, None]}} for i in range(3)]),
    "traces": (load_traces, [{"key": f"q{i}\nsteps", "value": "<search> a</search>", "reward": 1} for i in range(3)]),
    "rollouts": (load_rollouts, [Rollout(f"q{i}", (1, 2), [], i, False, "answer", 1.0).to_dict() for i in range(3)]),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_jsonl_file_cut_at_any_byte_is_an_error_or_whole_rows(tmp_path, kind):
    """Lines carry no count, so a cut between two of them leaves a shorter file that is whole; checksums see that."""
    load, rows = LOADERS[kind]
    path = tmp_path / "x.jsonl"
    save_jsonl(path, rows)
    whole, want = path.read_bytes(), load(path)
    ends = [i for i, c in enumerate(whole) if c == 10]
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        if n in ends or n - 1 in ends:  # with or without its last line break
            assert load(path) == want[: sum(e <= n for e in ends)]
        elif n or kind == "questions":
            with pytest.raises(ValueError, match="x.jsonl"):
                load(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=st.dictionaries(st.sampled_from(["id", "text", "answer", "family", "max_steps", "info", "x"]), values))
def test_any_row_is_a_question_or_a_named_fault(tmp_path, change):
    path = tmp_path / "f.jsonl"
    save_jsonl(path, [ROW | change])
    try:
        (question,) = load_questions(path)
    except ValueError as e:
        assert "f.jsonl" in str(e)
    else:
        assert question.text.strip() and all(a.strip() for a in question.answers) and "x" not in change


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=60), place=st.integers(0, 10_000), kind=st.sampled_from(["questions", "parquet"]))
def test_any_bytes_put_into_a_file_are_an_error_that_names_it_or_questions(tmp_path, data, place, kind):
    path = tmp_path / "f"
    if kind == "questions":
        save_jsonl(path, [ROW])
    else:
        parquet(path, VERL)
    whole = path.read_bytes()
    at = place % len(whole)
    path.write_bytes(whole[:at] + data + whole[at + len(data) :])
    try:
        questions = (load_questions if kind == "questions" else load_verl_questions)(path)
    except ValueError as e:
        assert str(path) in str(e)
    else:
        assert all(q.text.strip() and q.answers for q in questions)


def test_an_evaluation_without_questions_is_refused(tiny_policy):
    with pytest.raises(ValueError, match="no questions to evaluate on"):
        evaluate(tiny_policy, [], make_pocket_toolbox("test"), limits=SamplingLimits(10, 1, 1), seed=0)


def test_trajectories_written_and_read_are_equal(tmp_path):
    rollouts = [Rollout("q", (1, 2), [], 0, True, "eos", None)]
    save_rollouts(tmp_path / "r.jsonl", rollouts)
    assert load_rollouts(tmp_path / "r.jsonl") == rollouts
