"""The pocket world: its facts, questions, tokenizer, demonstrators, and that the shipped files fit the code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import random
import shutil

import pytest

from rapo_lib.buffer import TOP_K, select_trajectories
from rapo_lib.config import DATA
from rapo_lib.pocket import __main__ as command
from rapo_lib.pocket import build
from rapo_lib.pocket.demonstrator import Demonstration, Habits
from rapo_lib.pocket.files import POCKET, checked, verify_checksums, write_checksums
from rapo_lib.pocket.tokenizer import make_tokenizer
from rapo_lib.pocket.train import RECIPES, sample_examples
from rapo_lib.pocket.world import (
    HARD,
    PRELUDE,
    REGIMES,
    SKILLS,
    Chain,
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
from rapo_lib.rollout import RolloutRequest
from rapo_lib.tasks import load_pocket_questions
from rapo_lib.tools import make_pocket_toolbox
from rapo_lib.traces import Protocol, Rollout, load_rollouts, parse_step


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


#: sha256 of 30 training examples of each stage and of the number drawn after them, from before other habits came.
STREAMS = {
    ("base", 0): "0c4c8255a8fe1563135fbeb81dbcc3462ae42af1ecc51b8d4aaade8c9aa743bb",
    ("base", 1): "fdbe91d9898620808972ba2333700105d117962dbe8e9528eb4ee91eaf88d8fe",
    ("student", 0): "e9d8fc444625c078018ddc67cc1d817eedba5a39f31c39cf647e71acdc361ac0",
    ("teacher", 0): "90d2d9371607c8181a0111c60c13f0f9c83ef5c9caada47073e60ebc7eed20e0",
    ("weak", 0): "7531e475e5af67f59ff2196a3971e8aca21d6575e85090cd95eb04bd3251d944",
}


@pytest.mark.parametrize(("name", "stage"), STREAMS)
def test_the_first_models_are_shown_the_same_demonstrations_as_ever(name, stage, protocol):
    rng = random.Random(f"pin|{name}|{stage}")
    rows = list(itertools.islice(sample_examples(protocol, RECIPES[name].stages[stage], rng), 30))
    assert hashlib.sha256(json.dumps([rows, rng.random()]).encode()).hexdigest() == STREAMS[name, stage]


def demonstrate(chain: Chain, habits: Habits, rng: random.Random) -> list[str]:
    """The demonstration's own pieces."""
    demo = Demonstration(chain, habits, rng, lambda: sample_chain(chain.world, Shape(4, 1), rng))
    return [p.text for p in demo.pieces if p.own]


@pytest.mark.parametrize(("hard", "form", "result"), [(1.0, "code 85 ship", "Rorema"), (0.0, "ship of 85", "Nelive")])
def test_a_rechecking_demonstrator_makes_each_hard_call_twice(hard, form, result, monkeypatch):
    """What is the blog of the ship of the price of Kavelo? A table, a find (hard) and an open step."""
    facts = {("price", "Kavelo"): "85", ("ship", "85"): result, ("blog", result): "Zoneda"}
    monkeypatch.setattr(World, "fact", lambda self, target, kind, word, value: facts[word, value])
    ops = Op("table", "price"), Op("find", "ship"), Op("open", "blog")
    chain = Chain(World("x", ["Kavelo"]), ops, ("Kavelo", "85", result, "Zoneda"))
    demo = Demonstration(chain, Habits(1, hard, 1, 1, 0, rechecks=1.0), random.Random(0), lambda: chain)
    find = f"<think> need ship of 85</think><search> {form}</search>"
    assert [(p.text, p.own) for p in demo.pieces] == [
        ("<think> need price of Kavelo</think><search> price of Kavelo</search>", True),
        ("<result> 85</result>", False),
        (find, True),
        (f"<result> {result}</result>", False),
        (find, True),
        (f"<result> {result}</result>", False),
        (f"<think> need blog of {result}</think><browse> blog of {result}</browse>", True),
        ("<result> Zoneda</result>", False),
        (r"<think> done</think><answer> \boxed{ Zoneda}</answer>", True),
    ]


def test_rechecks_leave_the_answer_right_and_are_as_frequent_as_said():
    world, rng, extra = World("d", split_names("train")), random.Random(6), 0
    for _ in range(200):
        chain = sample_chain(world, Shape(6, 3), rng)
        own = demonstrate(chain, Habits(1, 1, 1, 1, 0, rechecks=0.7), rng)
        assert own[-1] == answer_text(chain.values[-1])
        assert list(dict.fromkeys(own[:-1])) == [a for a, _ in solution(chain)]
        extra += len(own) - 7
    assert 0.65 < extra / 600 < 0.75


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("middling", {"find": 0.78, "follow": 0.78, "convert": 0.78}),
        ("searcher", {"find": 0.9, "follow": 0.9, "convert": 0.3}),
        ("reckoner", {"find": 0.5, "follow": 0.5, "convert": 0.93}),
        ("wasteful", {"find": 0.93, "follow": 0.93, "convert": 0.93}),
    ],
)
def test_each_teacher_is_shown_its_skills_as_often_right_as_its_recipe_says(name, rates):
    habits = dataclasses.replace(RECIPES[name].stages[0].habits, retrieval_share=0.0)
    world, rng, words = (
        World("d", split_names("train")),
        random.Random(7),
        {w: s for s in HARD for w in SKILLS[s].words},
    )
    right, calls = dict.fromkeys(HARD, 0), dict.fromkeys(HARD, 0)
    for _ in range(1000):
        own = dict.fromkeys(demonstrate(sample_chain(world, Shape(5, 3), rng), habits, rng))  # each call once
        for text in own:
            step = parse_step(text)
            skill = words.get(step.thought.split()[1]) if step.action else None
            if skill:
                calls[skill] += 1
                right[skill] += not step.action[1].startswith(step.thought.split()[1]) and " * " not in step.action[1]
    assert {s: right[s] / calls[s] for s in HARD} == pytest.approx(rates, abs=0.05)  # 0.05: three standard errors
    assert min(calls.values()) > 800


def test_habits_of_skills_that_are_not_hard_are_refused():
    for pairs in ((("calc", 0.3),), (("find", 0.3), ("find", 0.4))):
        with pytest.raises(ValueError, match="allowed, each once: find, follow, convert"):
            Habits(1, 1, hard_by_skill=pairs)


def test_every_model_is_trained_once_and_after_the_one_it_starts_from():
    order = [name for wave in build.WAVES for name in wave]
    assert sorted(order) == sorted(RECIPES) == sorted(p.name for p in (POCKET / "models").iterdir())
    assert all(order.index(r.start) < order.index(name) for name, r in RECIPES.items() if r.start)
    assert len({r.seed for r in RECIPES.values()}) == len(RECIPES)


@pytest.mark.parametrize("part", command.SOME)
def test_unknown_models_and_teachers_are_refused(part):
    with pytest.raises(ValueError, match="'expert' is not known; allowed: .*weak"):
        command.main([part, "--only", "expert"])


def test_the_command_does_a_part_for_some_teachers_alone(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(build, "make_trajectories", lambda teachers: called.append(teachers))
    command.main(["trajectories", "--only", "weak", "patient"])
    assert called == [["weak", "patient"]]
    with pytest.raises(SystemExit):
        command.main(["data", "--only", "weak"])
    assert "--only does not go with data; it goes with models, trajectories" in capsys.readouterr().err


@pytest.fixture(scope="module")
def exploration() -> dict[str, list[Rollout]]:
    """The shipped trajectories of each teacher."""
    return {t: load_rollouts(POCKET / "trajectories" / f"{t}_exploration.jsonl") for t in build.TEACHERS}


def test_each_teacher_ships_the_trajectories_that_the_code_samples(exploration):
    names = {f"{t}_{regime}.jsonl" for t, how in build.TEACHERS.items() for regime in how.regimes}
    assert {p.name for p in (POCKET / "trajectories").iterdir()} == names
    questions = {q.id: q for q in make_questions("exploration", "train")}
    for teacher, rollouts in exploration.items():
        how = build.TEACHERS[teacher]
        places, right = [(r.question_id, r.place) for r in rollouts], [r for r in rollouts if r.reward == 1]
        sampled = [(q, k) for q in questions for k in range(how.samples)]
        if how.ship == "all":
            assert places == sampled
        else:
            assert len(set(places)) == len(places) and set(places) <= set(sampled)
            assert rollouts == (select_trajectories(rollouts, TOP_K) if how.ship == "kept" else right)
        spent = [len(r.tool_calls) - questions[r.question_id].max_steps for r in rollouts]
        assert max(spent) == how.extra_steps


def test_the_wasteful_teacher_makes_its_hard_calls_twice_and_no_one_else_does(exploration):
    twice = {}
    for teacher in ("teacher", "wasteful"):
        kept = select_trajectories(exploration[teacher], TOP_K)
        twice[teacher] = [sum(s.info["repeats"] == 2 for s in r.tool_calls) for r in kept]
    assert sum(twice["teacher"]) == 0
    assert sum(n == 3 for n in twice["wasteful"]) / len(twice["wasteful"]) > 0.75


def test_spare_steps_are_what_the_wasteful_teacher_needs():
    requests = [RolloutRequest(q, place=k) for q in make_questions("exploration", "test")[:8] for k in range(2)]
    rates = []
    for extra in (0, build.TEACHERS["wasteful"].extra_steps):
        how = {"seed": 0, "stream": ("test",), "extra_steps": extra}
        rollouts = build.sample_with(POCKET / "models" / "wasteful", requests, "test", **how)
        rates.append(sum(r.reward for r in rollouts) / len(rollouts))
    assert rates[0] < 0.1 and rates[1] > 0.35


def test_the_data_card_says_what_the_buffers_get():
    lines = (DATA / "README.md").read_text(encoding="utf-8").splitlines()
    table = build.coverage()
    head = lines.index("| " + " | ".join(table.columns) + " |")
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines[head + 2 : head + 2 + len(table)]]
    assert rows == [[str(v) for v in row] for row in table.itertuples(index=False)]


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
    for name in RECIPES:
        config = json.loads((POCKET / "models" / name / "config.json").read_text(encoding="utf-8"))
        assert config["architectures"] == ["Qwen3ForCausalLM"] and config["tie_word_embeddings"]
