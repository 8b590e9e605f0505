"""The pocket world: its facts, questions, tokenizer, demonstrators, and that the shipped files fit the code."""

from __future__ import annotations

import functools
import itertools
import json
import random
import shutil

import pytest

from rapo_lib.pocket.demonstrator import Demonstration, Habits
from rapo_lib.pocket.files import POCKET, checked, verify_checksums, write_checksums
from rapo_lib.pocket.tokenizer import make_tokenizer
from rapo_lib.pocket.world import (
    HARD,
    PRELUDE,
    REGIMES,
    SKILLS,
    Op,
    Shape,
    World,
    answer_text,
    make_questions,
    make_world,
    sample_chain,
    split_names,
    step_text,
)  # fmt: skip
from rapo_lib.policy import load_policy
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import Protocol, parse_step


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return Protocol(make_tokenizer())


@pytest.fixture(scope="module")
def toolbox():
    return make_pocket_toolbox("test")


def solution(chain) -> list[tuple[str, str]]:
    return [step_text(chain.world, o, v)[:2] for o, v in zip(chain.ops, chain.values[:-1], strict=True)]


def test_no_name_stands_in_two_splits():
    splits = [set(split_names(s)) for s in ("train", "validation", "test", "pretrain")]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 1920


def test_every_family_has_exactly_one_hard_skill():
    assert sorted(SKILLS[s].family for s in HARD) == ["computational", "knowledge", "web"]


@pytest.mark.parametrize("right", [True, False])
def test_the_real_tools_answer_every_form_as_the_world_says(right, toolbox):
    world, rng = make_world("test"), random.Random(0)
    for skill in (s for s in SKILLS.values() if right or s.wrong):
        for word in skill.words:
            value = rng.choice(world.names) if skill.source == "E" else str(rng.randint(10, 99))
            op = Op(skill.name, word, 25 if skill.name in ("calc", "compare") else None)
            argument, result = world.apply(op, value, right)
            assert toolbox.run([(skill.tool, argument)])[0].text.strip() == result, (skill.name, argument)


def test_the_prelude_and_the_world_convert_alike():
    scope: dict = {}
    exec(PRELUDE, scope)  # our own text, not a model's
    for value in (10, 42, 99, 126):
        for unit in ("feet", "miles", "pounds", "ounces"):
            world = World("x", ["A"]).apply(Op("convert", unit), str(value))[1]
            assert world == str(scope["convert"](value, scope[unit])) != str(value * scope[unit])


@pytest.mark.parametrize("regime", REGIMES)
def test_questions_have_the_shape_of_their_regime_and_one_answer(regime):
    shapes = {(s.steps, s.n_hard) for s in REGIMES[regime]}
    questions = make_questions(regime, "validation")
    for q in questions:
        assert (q.max_steps, q.info["n_hard"]) in shapes
        assert len(set(q.info["chain"])) == len(q.info["chain"]) == q.max_steps + 1
        assert q.answer == q.info["chain"][-1] and q.answer not in q.text.replace("?", "").split()
    assert len({q.text for q in questions}) == len(questions)


@pytest.mark.parametrize("regime", REGIMES)
def test_shipped_questions_are_those_that_the_code_makes(regime):
    for split in ("train", "validation", "test"):
        shipped = load_pocket_questions(regime, split)
        assert [(q.id, q.text, q.answers) for q in shipped] == [
            (q.id, q.text, (q.answer,)) for q in make_questions(regime, split)
        ]


@pytest.mark.parametrize("regime", REGIMES)
def test_wrong_forms_never_reach_the_answer_with_the_real_tools(regime, toolbox):
    for q in load_pocket_questions(regime, "test"):
        ops = [Op(*o) for o in zip(q.info["skills"], q.info["words"], q.info["operands"], strict=True)]
        hard = [i for i, o in enumerate(ops) if SKILLS[o.skill].hard]
        for wrong in (set(c) for n in range(1, len(hard) + 1) for c in itertools.combinations(hard, n)):
            value = q.info["chain"][0]
            for i, op in enumerate(ops):
                argument = World("any", ["A"]).apply(op, value, i not in wrong)[0]
                value = toolbox.run([(SKILLS[op.skill].tool, argument)])[0].text.strip()
            assert value != q.answer, (q.id, wrong)


def test_impossible_shape_is_refused():
    with pytest.raises(ValueError, match="too few words"):
        sample_chain(make_world("train"), Shape(4, 0, ("computational",), inner=False), random.Random(0))


def test_unknown_split_and_regime_are_refused():
    with pytest.raises(ValueError, match="allowed: train, validation"):
        split_names("dev")
    with pytest.raises(ValueError, match="allowed: exploration"):
        make_questions("hard", "train")


def test_six_steps_fit_160_ids_and_tokens_round_trip(protocol):
    world, rng = make_world("train"), random.Random(2)
    for _ in range(100):
        chain = sample_chain(world, Shape(6, 3), rng)
        text = "".join(a + b for a, b in solution(chain)) + answer_text(chain.values[-1])
        ids = protocol.tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) <= 160 and protocol.decode(ids) == text


def test_every_tag_is_one_token_and_syllables_are_shared_between_splits(protocol):
    encode = lambda t: protocol.tokenizer.encode(t, add_special_tokens=False)  # noqa: E731
    assert all(len(encode(t)) == 1 for t in ("<search>", "</retrieve>", "</answer>"))
    seen = {i for n in split_names("pretrain") for i in encode(" " + n)}
    assert all(set(encode(" " + n)) <= seen for n in split_names("test"))


def test_steps_of_the_world_parse_as_the_protocol_says():
    chain = sample_chain(make_world("train"), Shape(5, 3), random.Random(3))
    for (own, _), op in zip(solution(chain), chain.ops, strict=True):
        assert parse_step(own).action[0] == SKILLS[op.skill].tool


def test_a_perfect_demonstrator_is_right_and_a_hopeless_one_never():
    world, rng = World("d", split_names("train")), random.Random(4)
    for habits, want in ((Habits(1, 1, 1, 1, 0), True), (Habits(1, 0, 0, 1, 0), False)):
        for _ in range(30):
            chain = sample_chain(world, Shape(5, 3), rng)
            demo = Demonstration(chain, habits, rng, lambda: sample_chain(world, Shape(4, 1), rng))
            assert (demo.pieces[-1].text == answer_text(chain.values[-1])) is want


def test_a_retrieved_step_is_not_the_demonstrators_own():
    world, rng = World("d", split_names("train")), random.Random(5)
    chain = sample_chain(world, Shape(6, 3), rng)
    demo = Demonstration(chain, Habits(1, 1, 1, 1, 1.0, 0.0), rng, lambda: chain)
    retrieved = [p for p in demo.pieces if "<retrieve>" in p.text]
    assert retrieved and not any(p.own for p in retrieved)


def test_shipped_files_carry_their_checksums():
    verify_checksums()


def test_a_damaged_file_is_named_with_both_checksums(tmp_path):
    (tmp_path / "a.txt").write_text("other", encoding="utf-8")
    (tmp_path / "checksums.json").write_text(json.dumps({"a.txt": "0" * 64}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.txt: sha256 is [0-9a-f]{64}, expected 0{64}"):
        verify_checksums(tmp_path)


def test_a_damaged_shipped_model_is_named_before_it_is_loaded(tmp_path, monkeypatch):
    shutil.copytree(POCKET / "models" / "weak", tmp_path / "models" / "weak")
    write_checksums(tmp_path)
    monkeypatch.setattr("rapo_lib.policy.checked", functools.partial(checked, root=tmp_path))
    load_policy(tmp_path / "models" / "weak")
    weights = tmp_path / "models" / "weak" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"model\.safetensors: sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}"):
        load_policy(tmp_path / "models" / "weak")


def test_shipped_models_are_qwen3_with_tied_embeddings():
    for name in ("student", "teacher", "weak"):
        config = json.loads((POCKET / "models" / name / "config.json").read_text(encoding="utf-8"))
        assert config["architectures"] == ["Qwen3ForCausalLM"] and config["tie_word_embeddings"]
