"""One mutant or more for each of the 44 known faults: the code without its fix, and whether the tests notice.

    python tests/mutants.py             all of them, one after the other (about a quarter of an hour)
    python tests/mutants.py --case 7    those of one fault
    python tests/mutants.py --jobs 4    four at once

Each mutant is tried in a copy of the repository; the working tree is not touched. Only the tests that carry the
fault's number run. A mutant that survives means that a test which claims the number does not guard it.

Some faults lie partly in pinned libraries. Their mutants take out our part: of 32 the serialised FAISS index (the
import order of torch and faiss is theirs, and a test runs both), of 39 the checks around papermill.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
N_CASES = 44
#: A hang of the tests is no verdict on a mutant.
LIMIT_SEC = 900
#: Test files that start processes or train; they come last, since the first failure ends a try.
SLOW = ("test_trainer.py", "test_cases.py", "test_runs.py", "test_execution.py", "test_distributed.py")
LINKED = ("data", "results")
COPIED = ("rapo_lib", "tests", "notebooks")


@dataclass(frozen=True)
class Mutant:
    """A replacement that takes the fix of a known fault out.

    Args:
        case: number of the fault, 1 .. 44.
        file: path below the repository.
        old: text that stands there exactly once.
        new: what replaces it.
    """

    case: int
    file: str
    old: str
    new: str


def _m(case: int, module: str, old: str, new: str) -> Mutant:
    return Mutant(case, f"rapo_lib/{module}.py", old, new)


MUTANTS = [
    _m(
        1,
        "rollout",
        "ids = self.ids[request, a:b].tolist()",
        "ids = list(self.policy.protocol.encode(self.protocol.decode(self.ids[request, a:b].tolist())))[: b - a]",
    ),
    _m(2, "trainer", '"env_mask": [r.policy_mask for r', '"env_mask": [[1] * len(r.policy_mask) for r'),
    _m(
        2,
        "trainer",
        "logits = model(input_ids=x, ",
        "logits = model(input_ids=torch.where(target | (columns < n_prompt), x, 5), ",
    ),
    _m(3, "policy", "found |= set(ids) if isinstance", "found |= set(ids[:1]) if isinstance"),
    _m(4, "traces", "kept.append(s if len(s.ids) <= left else s.cut(left))", "kept.append(s)"),
    _m(4, "rollout", "ids = ids[: self.limits.max_completion - a]", "ids = ids[: len(self.ids[0]) - a]"),
    _m(5, "traces", 'return [int(s.origin == "policy") for', 'return [int(s.origin != "retrieval") for'),
    _m(6, "traces", "        if tag in text:\n", "        if False:\n"),
    _m(7, "traces", "{neutralise(text, self._marks).strip()}</result>", "{text.strip()}</result>"),
    _m(7, "traces", "<retrieve>{neutralise_step(value, self._marks)}</retrieve>", "<retrieve>{value}</retrieve>"),
    _m(8, "trainer", "start = attention.argmax(1)", "start = 0 * attention.argmax(1)"),
    _m(
        8,
        "policy",
        "hidden = keys > positions[..., None]",
        "hidden = keys > positions.max() + 0 * positions[..., None]",
    ),
    _m(9, "rollout", "self.waiting[row] = self._ends_step(row)", "self.waiting |= self._ends_step(row)"),
    _m(10, "traces", "if not tokenizer.chat_template:", "if False:"),
    _m(
        10,
        "traces",
        "return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)",
        "return neutralise(question)",
    ),
    _m(
        11,
        "rewards",
        """    if not rollout.segments or rollout.segments[-1].origin != "policy":
        return None
    answer = _parsed(protocol, rollout.segments[-1].ids).answer
""",
        "    answer = protocol.decode(rollout.completion_ids)\n",
    ),
    _m(12, "rewards", "a, b = parse_number(pred), parse_number(gold)", "a = b = None"),
    _m(12, "rewards", "boxes = deque(_BOX.finditer(text), maxlen=1)", "boxes = list(_BOX.finditer(text))"),
    _m(12, "rewards", 'pred != "" and pred == normalise_answer(gold)', "pred == normalise_answer(gold)"),
    _m(12, "rewards", '_ARTICLES.sub(" ", text)', "text"),
    _m(13, "traces", r"s*+(?:(?:<think>)?(?P<thought>", r"s*+(?:<think>(?P<thought>"),
    _m(14, "rewards", "MATH_LIMIT_SEC = 2.0", "MATH_LIMIT_SEC = 20.0"),
    _m(
        15,
        "objective",
        "torch.tensor([number.setdefault(i, len(number)) for i in ids]",
        "torch.tensor([place // 2 for place, _ in enumerate(ids)]",
    ),
    _m(16, "objective", "valid = values.isfinite()", "valid = torch.ones_like(values, dtype=torch.bool)"),
    _m(16, "objective", ".masked_fill(~_differs(values, group), 0.0)", ""),
    _m(17, "objective", "mask.sum(-1).clamp(min=1)", "mask.sum(-1)"),
    _m(17, "trainer", "nonzero().flatten().tolist() or [0]", "nonzero().flatten().tolist()"),
    _m(17, "trainer", "if self._clippable else math.nan", "if self._clippable else 0.0"),
    _m(18, "objective", "-((gain * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()", "-(gain * mask).mean()"),
    _m(19, "policy", "logits if temperature == 1.0 else logits / temperature", "logits"),
    _m(19, "objective", "torch.log_softmax(logits / temperature, dim=-1)", "torch.log_softmax(logits, dim=-1)"),
    _m(
        19,
        "rollout",
        "    greedy: bool = False,\n    retriever",
        "    greedy: bool = False,\n    top_p=1,\n    retriever",
    ),
    _m(20, "trainer", "    if dropout:\n", "    if False:\n"),
    _m(
        20,
        "trainer",
        'batch["old_per_token_logps"] = batch.pop("sampling_per_token_logps") - shaping.log()[:, None]',
        'batch.pop("sampling_per_token_logps")',
    ),
    _m(21, "trainer", 'loss_type="grpo", epsilon=config.clip', 'loss_type="bnpo", epsilon=config.clip'),
    _m(
        22,
        "objective",
        "return retrieval_quality(h_before, h_after) * _entropy(h_before)",
        "return 1 * retrieval_quality(h_before, h_after)",
    ),
    _m(22, "objective", "certain = before == 0", "certain = before < 0"),
    _m(22, "traces", "if pending:\n", "if before is not None:\n"),
    _m(23, "objective", "return (1 + weight * a_ret) * a_acc", "return a_acc + weight * a_ret * a_acc.abs()"),
    _m(24, "trainer", "hybrid=place >= n_on", "hybrid=place >= n_on - 1"),
    _m(24, "trainer", "place = (offset + i) % self.config.group_size", "place = i % self.config.group_size"),
    _m(25, "policy", "logps.clamp_(min=-1e5)", "logps.clamp_(max=0.0)"),
    _m(25, "objective", "logps.nan_to_num(neginf=0.0)", "logps"),
    _m(25, "traces", "return sum(self.entropies) / len(self.entropies)", "return sum(self.entropies)"),
    _m(
        26,
        "buffer",
        "return _unit_rows(dense.reshape(len(texts), self.dim))",
        "return _unit_rows(dense.reshape(len(texts), self.dim) + 0.01 * dense.mean())",
    ),
    _m(27, "buffer", "order = np.lexsort((ids, -scores))", "order = np.lexsort((-ids, -scores))"),
    _m(27, "buffer", "(dense / np.where(length == 0.0, 1.0, length))", "dense"),
    _m(27, "buffer", "for i in np.flatnonzero(length == 0.0)[:1]:", "for i in []:"),
    _m(28, "buffer", "if rows[i].any()] if len(self) else []", "if rows[i].any()]"),
    _m(
        28,
        "buffer",
        """            n_wanted = min(n_wanted, self.index.ntotal)
            floors, proposals = self.index.search(rows[todo], n_wanted)
            again = []
            for i, floor, keys in zip(todo, floors[:, -1], proposals, strict=True):
                found = keys[keys >= 0]  # FAISS marks a missing hit by -1
""",
        """            floors, proposals = self.index.search(rows[todo], n_wanted)
            again = []
            for i, floor, found in zip(todo, floors[:, -1], proposals, strict=True):
""",
    ),
    _m(29, "buffer", "if _sha256(data) != want:", "if False:"),
    _m(
        29,
        "buffer",
        'if (encoder.name, _as_json(encoder.settings)) != (sidecar["encoder"], sidecar["settings"]):',
        'if encoder.name != sidecar["encoder"]:',
    ),
    _m(30, "buffer", "allowed &= self._question[ids] != self._codes.get(excluded, -1)", "allowed &= True"),
    _m(30, "tasks", "    if both:\n", "    if False:\n"),
    _m(
        31,
        "buffer",
        "return [*units[:head], *units[len(units) - (max_units - head) :]]",
        "return list(units[:max_units])",
    ),
    _m(31, "buffer", "cut = sum(map(encoder.is_cut, keys)) / max(len(keys), 1)", "cut = 0.0"),
    _m(
        32,
        "buffer",
        'write_bytes_atomic(folder / "index.faiss", faiss.serialize_index(self.index).tobytes())',
        'faiss.write_index(self.index, folder / "index.faiss")',
    ),
    _m(33, "policy", "    if lost:\n", "    if False:\n"),
    _m(33, "policy", 'if saved["checksum"] != base_checksum(policy):', "if False:"),
    _m(34, "checkpoints", "elif (checkpoint / COMPLETE).exists():", "else:"),
    _m(34, "checkpoints", 'return f"{name} has sha256', 'return "" and f"{name} has sha256'),
    _m(
        34,
        "checkpoints",
        'self.optimizer.load_state_dict({"state": dict(sorted(state.items())), "param_groups": groups})',
        "pass",
    ),
    _m(34, "execution", "        for name, value in state.items():\n            setattr(self, name, value)\n", ""),
    _m(
        35,
        "rollout",
        "return lambda purpose: child_rng(seed, *keys, purpose)",
        "rng = child_rng(seed, *keys)\n    return lambda purpose: rng",
    ),
    _m(
        35,
        "config",
        "hashlib.blake2b(json.dumps([seed, *names]).encode(), digest_size=16).digest()",
        'hash((seed, *names)).to_bytes(16, "little", signed=True)',
    ),
    _m(36, "tools", "if counts.calls == counts.failures == self.warn_after:", "if False:"),
    _m(36, "tools", "            tool.check()\n", ""),
    _m(36, "plots", '"tool_failures_frac": ("failed tool calls (%)"', '"failures": ("failed tool calls (%)"'),
    _m(37, "rollout", "if repeats > REPEATS_BEFORE_NOTE else", "if False else"),
    _m(37, "rollout", 'return "calls"\n', 'return ""\n'),
    _m(37, "tools", 'failed(f"the {name} call is empty")', 'ToolResult("")'),
    _m(39, "driver", "if unknown := sorted(set(wanted) - declared):", "if unknown := []:"),
    _m(39, "driver", "    if never or _left_early(done):\n", "    if False:\n"),
    _m(39, "driver", "if isinstance(value, list | tuple):", "if isinstance(value, list):"),
    _m(40, "driver", '    nb.metadata.pop("widgets", None)\n', ""),
    Mutant(40, "notebooks/05_training.ipynb", '"name": "python3"', '"name": "my-env"'),
    _m(41, "stats", 'return Verdict("inconclusive", d', 'return Verdict("not reproduced", d'),
    Mutant(
        41,
        "notebooks/05_training.ipynb",
        'set_title(\\"Easy regime: held-out questions\\")',
        'set_title(\\"Easy regime: RAPO 97 %, GRPO 64 %\\")',
    ),
    _m(42, "stats", "sps.t.ppf((1 + confidence) / 2, n - 1)", "sps.norm.ppf((1 + confidence) / 2)"),
    _m(42, "plots", "with_palette(drawn.getvalue())", "drawn.getvalue()"),
    _m(
        42,
        "stats",
        "mid = (p + z * z / (2 * n)) / shrink",
        "mid = p",
    ),
    _m(38, "guard", "if mean is None or self._best_reward < REWARD_UP", "if True or self._best_reward < REWARD_UP"),
    _m(38, "execution", 'if rate > self.best.get("pass@1", -1.0):', "if True:"),
    _m(43, "runs", 'with _to_log(partial / "log.txt"):', "with contextmanager(lambda: (yield))():"),
    _m(43, "driver", 'print(f"\\r\\x1b[K{(self.name + text)[:width]}", end="", flush=True)', "print(self.name + text)"),
    _m(
        43,
        "execution",
        '        else:\n            self._write_table("metrics", pd.DataFrame(self.metrics))\n',
        "",
    ),
    _m(
        44,
        "traces",
        'json.loads(line.decode("utf-8"))',
        'json.loads(line.decode("cp1252"))',
    ),
]


def marked_cases(path: Path) -> set[int]:
    """Numbers in the `case` marks of a test file, read without importing it."""
    calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    marks = [c for c in calls if ast.unparse(c.func) == "pytest.mark.case"]
    return {ast.literal_eval(a) for c in marks for a in c.args}


def try_mutant(mutant: Mutant) -> tuple[str, float]:
    """Run a fault's tests on a copy of the repository without the fix.

    Returns:
        `killed`, `SURVIVED` or `ERROR` (no test ran, or no end after LIMIT_SEC), and seconds.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.name in LINKED:
                (copy / path.name).symlink_to(path)
            elif path.is_file():
                shutil.copy2(path, copy)
        changed = copy / mutant.file
        text = changed.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise SystemExit(f"case {mutant.case}: {mutant.file} holds {text.count(mutant.old)} times: {mutant.old}")
        changed.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        files = [p for p in sorted((copy / "tests").glob("test_*.py")) if mutant.case in marked_cases(p)]
        files.sort(key=lambda p: SLOW.index(p.name) if p.name in SLOW else -1)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--case", str(mutant.case)]
        env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        start = time.monotonic()
        try:
            done = subprocess.run(
                [*command, *map(str, files)], cwd=copy, env=env, capture_output=True, timeout=LIMIT_SEC
            )
        except subprocess.TimeoutExpired:
            return "ERROR", time.monotonic() - start
        verdict = {0: "SURVIVED", 1: "killed"}.get(done.returncode, "ERROR")
        if verdict == "ERROR":
            print(done.stdout.decode("utf-8", "replace")[-2000:], file=sys.stderr)
        return verdict, time.monotonic() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants; 0 when the tests noticed all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=int, choices=range(1, N_CASES + 1), metavar="N", help="only this fault's")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    a = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if a.case in (None, m.case)]
    noticed: dict[int, bool] = {}
    with ThreadPoolExecutor(a.jobs) as pool:
        for m, (verdict, sec) in zip(chosen, pool.map(try_mutant, chosen), strict=True):
            noticed[m.case] = noticed.get(m.case, True) and verdict == "killed"
            print(f"case {m.case:>2}  {verdict:<8} {sec:5.0f} s  {m.file}: {' '.join(m.new.split())[:70]}", flush=True)
    n_cases = 1 if a.case else N_CASES
    print(f"{sum(noticed.values())} of {n_cases} killed")
    return int(sum(noticed.values()) < n_cases)


if __name__ == "__main__":
    sys.exit(main())
