"""The trajectory explorer: step through the rollouts that a run stored, or through any file of rollouts.

Notebook 05 uses it. A file is indexed by the place of each line and a few fields (`RolloutFile`); a rollout is read in
whole only when it is looked at, so that ten thousand of them open at once. `card_html` draws one rollout, `Explorer` is
the widget around it. In a batch, in an executed copy and in an exported page a drawing of one rollout stands in its
place. All text comes from models and files: it is escaped, always.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ipywidgets as w
import matplotlib
from IPython.display import display
from matplotlib.colors import to_hex

from rapo_lib.config import RunConfig
from rapo_lib.hybrids import credit_table
from rapo_lib.objective import retrieval_reward
from rapo_lib.show import AUTHORS, BATCH, escape, show_widget, visible
from rapo_lib.tasks import Question
from rapo_lib.traces import Protocol, Rollout, Step

#: What colours tokens: name -> (what the scale means, value at which it is full).
COLOURINGS = {
    "entropy": ("token entropy, nats", 1.0),
    "change": ("log-probability after the update minus before, nats", 0.5),
    "author": ("who wrote it", 1.0),
}
#: Matches that the list shows.
MOST_LISTED = 400


# --------------------------------------------------------------------------------------------- the file


class Header(NamedTuple):
    """What is known of a rollout without reading it in whole.

    Args:
        offset: of its line in the file, bytes. rl_step: 0 in a file that knows no RL steps. place: in its group.
    """

    offset: int
    rl_step: int
    question_id: str
    place: int
    hybrid: bool
    end_reason: str
    reward: float | None
    retrievals: int
    calls: int

    @property
    def label(self) -> str:
        kind = f"hybrid, {self.retrievals} retrieved" if self.hybrid else "on-policy"
        step = f"RL step {self.rl_step}, " if self.rl_step else ""
        outcome = f"{_verdict(self.reward)}, {kind}, ended by {self.end_reason}"
        return f"{step}{visible(self.question_id)}, place {self.place}: {outcome}"


def _verdict(reward: float | None) -> str:
    return "not scored" if reward is None else "right" if reward >= 1 else "wrong"


_FIELDS = re.compile(
    rb'"question_id":"((?:[^"\\]|\\.)*)","prompt_ids":\[[\d,]*\],"place":(\d+),"hybrid":(true|false),'
    rb'"end_reason":"(\w*)","reward":(null|-?[\d.eE+-]+),'
)
_STEP = re.compile(rb'\{"rl_step":(\d+),')


class RolloutFile:
    """A JSONL file of rollouts: rows of a run's `rollouts.jsonl`, or of `save_rollouts`.

    Args:
        path: the file.

    Raises:
        ValueError: no file, an empty one, or a line that is no rollout; names the line.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path} is no file; expected JSONL, one rollout a line, such as a run's rollouts.jsonl")
        self.headers: list[Header] = []
        offset = 0
        with open(self.path, "rb") as f:
            for n, line in enumerate(f, 1):
                if line.strip():
                    self.headers.append(self._header(line, offset, n))
                offset += len(line)
        if not self.headers:
            raise ValueError(f"{path} holds no rollouts")

    def _header(self, line: bytes, offset: int, n: int) -> Header:
        m, step = _FIELDS.search(line), _STEP.match(line)
        if m is None:  # written by someone else: slower, and checked
            return self._slow_header(line, offset, n)
        reward = None if m[5] == b"null" else float(m[5])
        # A quotation mark inside a text is escaped, so these are fields and no text that looks like them.
        retrieved, called = line.count(b'"origin":"retrieval"'), line.count(b'"info":{"tool":')
        question = json.loads(b'"' + m[1] + b'"')
        place, hybrid, ended = int(m[2]), m[3] == b"true", m[4].decode()
        return Header(offset, int(step[1]) if step else 0, question, place, hybrid, ended, reward, retrieved, called)

    def _slow_header(self, line: bytes, offset: int, n: int) -> Header:
        row = self._row(line, f"{self.path}, line {n}")
        r = row["rollout"]
        found = (r.question_id, r.place, r.hybrid, r.end_reason, r.reward, len(r.retrievals), len(r.tool_calls))
        return Header(offset, int(row.get("rl_step") or 0), *found)

    def __len__(self) -> int:
        return len(self.headers)

    def read(self, header: Header) -> dict[str, Any]:
        """The whole row: `rollout`, and where the file has them `rl_step` and `logps_after`."""
        with open(self.path, "rb") as f:
            f.seek(header.offset)
            return self._row(f.readline(), f"{self.path}, byte {header.offset}") | {"rl_step": header.rl_step}

    @staticmethod
    def _row(line: bytes, where: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
            inside = row["rollout"] if isinstance(row, dict) and "rollout" in row else row
            rest = row if inside is not row else {}
            return {k: v for k, v in rest.items() if k != "rollout"} | {"rollout": Rollout.from_dict(inside)}
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise ValueError(f"{where} is no rollout: {e}") from None

    def group(self, header: Header) -> list[Header]:
        """The rollouts of the same question and RL step, by place."""
        same = [h for h in self.headers if (h.rl_step, h.question_id) == (header.rl_step, header.question_id)]
        return sorted(same, key=lambda h: h.place)


# -------------------------------------------------------------------------------------------- search

_NUMBERS = {name: n for n, name in enumerate("no one two three four five six seven eight nine ten".split())}
_HELP = "hybrid, on-policy, right, wrong, two retrievals, no retrievals, three calls, step 10, ended by budget, "
_HELP += "or part of a question's id"


def parse_search(text: str) -> list[tuple[str, Any]]:
    """Words of a search, separated by commas, as conditions.

    Raises:
        ValueError: a part that is no condition, with those that are.

    Example:
        >>> parse_search("hybrid, right, two retrievals")
        [('hybrid', True), ('right', True), ('retrievals', 2)]
    """
    found: list[tuple[str, Any]] = []
    for part in (p.strip().casefold() for p in text.split(",")):
        number = re.fullmatch(r"(\w+) (retrieval|call)s?", part)
        if not part:
            continue
        if part in ("hybrid", "on-policy", "alone"):
            found.append(("hybrid", part == "hybrid"))
        elif part in ("right", "wrong"):
            found.append(("right", part == "right"))
        elif number and (number[1].isdigit() or number[1] in _NUMBERS):
            found.append((number[2] + "s", int(_NUMBERS.get(number[1], number[1]))))
        elif m := re.fullmatch(r"(?:rl )?step (\d+)", part):
            found.append(("rl_step", int(m[1])))
        elif m := re.fullmatch(r"ended by (\w+)", part):
            found.append(("end_reason", m[1]))
        elif re.fullmatch(r"[\w.:/-]*\d[\w.:/-]*", part):
            found.append(("question_id", part))
        else:
            raise ValueError(f"{part!r} is nothing that can be searched for; try {_HELP}")
    return found


def matches(header: Header, conditions: Iterable[tuple[str, Any]]) -> bool:
    """Whether a rollout meets all conditions."""
    for name, want in conditions:
        if name == "right":
            met = header.reward is not None and (header.reward >= 1) == want
        elif name == "question_id":
            met = want in header.question_id.casefold()
        else:
            met = getattr(header, name) == want
        if not met:
            return False
    return True


# --------------------------------------------------------------------------------------------- drawing

_CARD = "font-size:15px;line-height:1.6;color:#111;background:#fff;border:1px solid #999;border-radius:6px;"
_CARD += "margin:6px 0;padding:8px"
# Text and ground together: a card is readable in a light and in a dark theme.
_FACTS = "font-family:sans-serif;font-size:14px;color:#333;background:#fff;white-space:normal"
#: Lines between the controls, in the colours of JupyterLab's theme.
_SAYS = "font-family:sans-serif;font-size:14px;color:var(--jp-content-font-color1,#111);white-space:normal"
_TEXT = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere"
#: Tokens that the policy did not write: they carry no gradient, and no colour of a scale.
_MASKED = "background:repeating-linear-gradient(135deg,{c},{c} 6px,#fff 6px,#fff 8px);border-bottom:2px dotted #555"


#: What stands in place of an advantage that cannot be computed.
NO_CREDIT = "advantage not known: it needs the whole group and the run's configuration"


@dataclass(frozen=True)
class Facts:
    """What a card says beside the text.

    Args:
        question: its text and gold answer; None when it is not known. credit: the rollout's row of `credit_table`; None
            where its group is not there. logps_after: after the RL step's update; None where they were not kept.
    """

    question: Question | None = None
    credit: Mapping[str, Any] | None = None
    logps_after: Sequence[float] | None = None


def card_html(
    rollout: Rollout, protocol: Protocol, facts: Facts, colour_by: str = "entropy", step: int | None = None
) -> str:
    """A rollout as one card a step.

    Args:
        rollout: what is drawn. protocol: of its ids. facts: what else is known. colour_by: a key of COLOURINGS.
        step: the step that is marked, from 0; None marks none.

    Raises:
        ValueError: an unknown colouring.
    """
    if colour_by not in COLOURINGS:
        raise ValueError(f"colour_by is {colour_by!r}; allowed: {', '.join(COLOURINGS)}")
    changes = _changes(rollout, facts.logps_after)
    parts, at, entropy, before = [_head_html(rollout, facts, colour_by)], 0, rollout.entropies, None
    for n, one in enumerate(rollout.steps):
        tokens = []
        for segment in one.segments:
            values = {"entropy": entropy, "change": changes, "author": None}[colour_by]
            here = None if values is None else values[at : at + len(segment.ids)]
            tokens.append(_segment_html(segment, protocol, here, colour_by))
            at += len(segment.ids)
        # Of retrieved steps in a row the last one is judged, as the retrieval reward does.
        after = next((s for s in rollout.steps[n + 1 : n + 2] if s.kind == "own"), None)
        parts.append(_step_html(n, one, before, after, "".join(tokens), n == step))
        before = one.segments[0].mean_entropy if one.kind == "own" and one.segments[0].entropies else before
    return f'<div style="background:#fff;color:#111;padding:4px">{"".join(parts)}</div>'


def _changes(rollout: Rollout, after: Sequence[float] | None) -> list[float]:
    if after is None or len(after) != len(rollout.logps):
        return [0.0] * len(rollout.logps)
    return [(b - a) if m else 0.0 for a, b, m in zip(rollout.logps, after, rollout.policy_mask, strict=True)]


def _head_html(rollout: Rollout, facts: Facts, colour_by: str) -> str:
    kind = f"hybrid, {len(rollout.retrievals)} retrieved" if rollout.hybrid else "on-policy"
    if rollout.end_reason:
        verdict, end = _verdict(rollout.reward), f"place {rollout.place}, ended by {escape(rollout.end_reason)}"
    else:
        verdict, end = "going on", f"place {rollout.place}"
    lines = [f"<b>{verdict}</b>, {kind}, {end}"]
    if q := facts.question:
        lines.append(f"Question {escape(q.id)}: <b>{escape(q.text)}</b> Gold answer: {escape(' or '.join(q.answers))}")
    else:
        lines.append(f"Question {escape(rollout.question_id)}")
    numbers = [f"{len(rollout.completion_ids)} tokens", f"F_ret {rollout.retrieved_frac:.2f}"]
    if c := facts.credit:
        numbers += [f"Z_ret {c['z_ret']:+.3f} nats", f"A_acc {c['a_acc']:+.2f}", f"A_ret {c['a_ret']:+.2f}"]
        numbers += [f"advantage {c['advantage']:+.2f}", f"shaping factor {c['shaping']:.3f}"]
    elif rollout.end_reason:
        numbers.append(NO_CREDIT)
    lines.append(", ".join(numbers))
    lines.append(_legend_html(colour_by, facts))
    return f'<div style="{_CARD}"><div style="{_FACTS}">{"<br>".join(lines)}</div></div>'


def _legend_html(colour_by: str, facts: Facts) -> str:
    meaning, full = COLOURINGS[colour_by]
    if colour_by == "author":
        boxes = [f'<span style="background:{c};padding:0 6px">{name}</span>' for c, name in AUTHORS.values()]
        return f"Colour: {meaning} {' '.join(boxes)}"
    if colour_by == "change" and facts.logps_after is None:
        return "Colour: this file holds no log-probabilities after the update"
    ends = (0.0, full / 2, full) if colour_by == "entropy" else (-full, 0.0, full)
    boxes = [f'<span style="{_shade(x, colour_by)};padding:0 6px">{x:+.2g}</span>' for x in ends]
    masked = f'<span style="{_MASKED.format(c="#e6e6e6")};padding:0 6px">not the policy\'s</span>'
    return f"Colour: {meaning} {' '.join(boxes)} {masked}"


def _shade(value: float, colour_by: str) -> str:
    """Background and text colour of a value; both scales keep their order in grey and for colour-blind readers."""
    # Most values are small: roots spread them, and the sign stays.
    x = math.copysign(math.sqrt(min(1.0, abs(value) / COLOURINGS[colour_by][1])), value)
    name, x = ("Blues", max(x, 0.0)) if colour_by == "entropy" else ("PuOr", 0.5 + 0.5 * x)
    r, g, b, _ = matplotlib.colormaps[name](x)
    dark = 0.299 * r + 0.587 * g + 0.114 * b < 0.55
    return f"background:{to_hex((r, g, b))};color:{'#fff' if dark else '#111'}"


def _segment_html(segment: Any, protocol: Protocol, values: Sequence[float] | None, colour_by: str) -> str:
    colour, name = AUTHORS[segment.origin]
    if segment.origin != "policy" or values is None:
        style = f"background:{colour}" if segment.origin == "policy" else _MASKED.format(c=colour)
        return f'<span style="{style}" title="{name}"><bdi>{escape(protocol.decode(segment.ids))}</bdi></span>'
    unit = "nats of entropy" if colour_by == "entropy" else "nats"
    out = []
    for text, value in _readable(segment.ids, values, protocol):
        out.append(f'<span style="{_shade(value, colour_by)}" title="{value:+.3f} {unit}">{escape(text)}</span>')
    return f"<bdi>{''.join(out)}</bdi>"


def _readable(ids: Sequence[int], values: Sequence[float], protocol: Protocol) -> list[tuple[str, float]]:
    """Texts of tokens with their values; tokens that only make a character together stand together, by their mean."""
    out: list[tuple[str, float]] = []
    held: list[int] = []
    kept: list[float] = []
    for i, v in zip(ids, values, strict=True):
        held.append(i)
        kept.append(v)
        text = protocol.decode(held)
        if "\ufffd" not in text or len(held) > 6:
            out.append((text, sum(kept) / len(kept)))
            held, kept = [], []
    return out + ([(protocol.decode(held), sum(kept) / len(kept))] if held else [])


def _step_html(n: int, step: Step, before: float | None, after: Step | None, tokens: str, marked: bool) -> str:
    frame = _CARD + (";border:3px solid #0072b2" if marked else "")
    facts = [f"<b>{n + 1}. {'own step' if step.kind == 'own' else 'retrieved step'}</b>"]
    first = step.segments[0]
    if step.kind == "own":
        facts += [f"step entropy {first.mean_entropy:.3f} nats"] if first.entropies else []
        for s in step.segments[1:]:
            facts.append(f"{escape(str(s.info.get('tool', 'tool')))} {'ok' if s.info.get('ok', True) else 'failed'}")
    else:
        facts += [f"{name} {escape(str(first.info[key]))}" for name, key in _SOURCES if first.info.get(key) is not None]
        facts += ["drawn at random (noise)"] if first.info.get("noisy") else []
        if before is not None and after is not None and after.segments[0].entropies:
            h = after.segments[0].mean_entropy
            reward = float(retrieval_reward(before, h))
            facts.append(f"entropy {before:.3f} before, {h:.3f} after, retrieval reward {reward:+.3f}")
        else:
            facts.append("no retrieval reward: it needs an own step on both sides")
    return (
        f'<div style="{frame}"><div style="{_FACTS}">{", ".join(facts)}</div><div style="{_TEXT}">{tokens}</div></div>'
    )


_SOURCES = (("written by", "teacher"), ("similarity", "score"), ("from question", "source_question_id"))


# -------------------------------------------------------------------------------------------- the view


class Collection:
    """Rollouts of one or more files, with what is needed to draw them.

    Args:
        files: name -> a RolloutFile. protocol: of their ids. questions: those they may be about. configs: name -> the
            run's configuration, for advantages; a file without one has none.
    """

    def __init__(
        self,
        files: Mapping[str, RolloutFile],
        protocol: Protocol,
        questions: Iterable[Question] = (),
        configs: Mapping[str, RunConfig] | None = None,
    ) -> None:
        if not files:
            raise ValueError("there are no rollouts to look at: no file was given")
        self.files, self.protocol, self.configs = dict(files), protocol, dict(configs or {})
        self.questions = {q.id: q for q in questions}
        self._credit: dict[tuple[str, int, str], dict[int, Mapping[str, Any]]] = {}

    @classmethod
    def of_runs(cls, runs: Iterable[Any], protocol: Protocol, questions: Iterable[Question] = ()) -> Collection:
        """Of finished runs; those that kept no rollouts are left out."""
        there = {r.label: r for r in runs if (r.folder / "rollouts.jsonl").exists()}
        files = {name: RolloutFile(r.file("rollouts.jsonl")) for name, r in there.items()}
        return cls(files, protocol, questions, {name: r.config for name, r in there.items()})

    def find(
        self, name: str, search: str = "", rl_step: int | None = None, question_id: str | None = None
    ) -> list[Header]:
        """Rollouts of a file that meet a search, in the file's order; of one RL step or question where it is given."""
        conditions = parse_search(search)
        there = self.files[name].headers
        there = there if rl_step is None else [h for h in there if h.rl_step == rl_step]
        there = there if question_id is None else [h for h in there if h.question_id == question_id]
        return [h for h in there if matches(h, conditions)]

    def question_label(self, question_id: str) -> str:
        """A question's id, and its text where it is known."""
        known = self.questions.get(question_id)
        return visible(f"{question_id}: {known.text}" if known else question_id)

    def card(self, name: str, header: Header, colour_by: str = "entropy", step: int | None = None) -> str:
        """The drawing of one rollout."""
        row = self.files[name].read(header)
        credit = self._credit_of(name, header)
        facts = Facts(self.questions.get(header.question_id), credit, row.get("logps_after"))
        return card_html(row["rollout"], self.protocol, facts, colour_by, step)

    def n_steps(self, name: str, header: Header) -> int:
        return len(self.files[name].read(header)["rollout"].steps)

    def siblings_html(self, name: str, header: Header) -> str:
        """The rollouts of the same group, one line each."""
        credit = self._group_credit(name, header)
        rows = []
        for h in self.files[name].group(header):
            style = "font-weight:bold;background:#e8f1f8" if h.place == header.place else ""
            c = credit.get(h.place)
            cells = [
                str(h.place),
                "hybrid" if h.hybrid else "on-policy",
                str(h.retrievals),
                str(h.calls),
                _verdict(h.reward),
            ]
            cells += [h.end_reason, f"{c['advantage']:+.2f}" if c is not None else ""]
            rows.append(
                f'<tr style="{style}">{"".join(f"<td style=padding-right:12px>{escape(x)}</td>" for x in cells)}</tr>'
            )
        heads = ("place", "kind", "retrieved", "calls", "outcome", "ended by", "advantage")
        head = "".join(f"<th style=padding-right:12px;text-align:left>{x}</th>" for x in heads)
        return f'<table style="{_FACTS}"><tr>{head}</tr>{"".join(rows)}</table>'

    def raw(self, name: str, header: Header) -> str:
        """The row as the file holds it, laid out; not escaped."""
        with open(self.files[name].path, "rb") as f:
            f.seek(header.offset)
            return json.dumps(json.loads(f.readline()), indent=1)

    def raw_link_html(self, name: str, header: Header) -> str:
        """A link that saves the row as a JSON file, and where the row stands."""
        data = base64.b64encode(self.raw(name, header).encode()).decode("ascii")
        place = f"{self.files[name].path}, from byte {header.offset}"
        link = f'<a download="rollout.json" href="data:application/json;base64,{data}">save it</a>'
        return f'<div style="{_SAYS};padding:0 6px">raw JSON: {link} ({escape(place)})</div>'

    def still_html(self, name: str, header: Header, colour_by: str = "entropy") -> str:
        """One rollout and its group, to be looked at without a kernel."""
        return self.card(name, header, colour_by) + self.siblings_html(name, header)

    def _credit_of(self, name: str, header: Header) -> Mapping[str, Any] | None:
        return self._group_credit(name, header).get(header.place)

    def _group_credit(self, name: str, header: Header) -> dict[int, Mapping[str, Any]]:
        """Advantages of a whole group, by place; nothing where it is not whole or no method is known."""
        key = name, header.rl_step, header.question_id
        if key not in self._credit:
            group, config = self.files[name].group(header), self.configs.get(name)
            rows = []
            if config is not None and len(group) == config.group_size:
                rows = credit_table([self.files[name].read(h) for h in group], config).to_dict("records")
            self._credit[key] = {row["place"]: row for row in rows}
        return self._credit[key]


class Explorer(w.VBox):
    """The widget: choose a file, an RL step, a question; search; walk through a rollout, beside another of its group.

    Arrow keys move in the lists and on the slider of steps.
    """

    def __init__(
        self, collection: Collection, search: str = "", colour_by: str = "entropy", name: str | None = None
    ) -> None:
        self.collection = collection
        wide, half = w.Layout(width="100%"), w.Layout(width="50%")
        names = list(collection.files)
        self.file = w.Dropdown(options=names, value=name or names[0], description="run", layout=half)
        self.rl_step = w.Dropdown(options=[("all", None)], description="RL step", layout=w.Layout(width="200px"))
        self.question = w.Dropdown(options=[("all", None)], description="question", layout=half)
        self.search = w.Text(search, description="search", continuous_update=False, placeholder=_HELP, layout=half)
        self.colour = w.ToggleButtons(options=list(COLOURINGS), value=colour_by, description="colour")
        self.rollout = w.Select(options=[], rows=6, description="rollouts", layout=wide)
        self.step = w.IntSlider(0, 0, 0, description="step", continuous_update=True, layout=w.Layout(width="60%"))
        self.back, self.forward = (w.Button(description=d, layout=w.Layout(width="90px")) for d in ("back", "forward"))
        self.compare = w.Dropdown(options=[("nothing", None)], description="beside it", layout=w.Layout(width="60%"))
        self.show_raw = w.ToggleButton(False, description="raw JSON")
        self.says, self.link, self.left, self.right, self.siblings = (w.HTML() for _ in range(5))
        self.left.layout = self.right.layout = wide
        rows = [w.HBox([self.file, self.rl_step]), w.HBox([self.question, self.search]), self.says, self.rollout]
        rows += [self.colour, w.HBox([self.back, self.forward, self.step])]
        self.cards = w.HBox([self.left])
        foot = w.HBox([self.show_raw, self.link])
        super().__init__([*rows, self.compare, self.cards, self.siblings, foot])
        self._quiet = False
        self.file.observe(lambda _: self._open(), "value")
        self.rl_step.observe(lambda _: self._offer_questions(), "value")
        for control in (self.question, self.search):
            control.observe(lambda _: self._list(), "value")
        self.rollout.observe(lambda _: self._choose(), "value")
        for control in (self.step, self.colour, self.compare, self.show_raw):
            control.observe(lambda _: self._draw(), "value")
        self.back.on_click(lambda _: self._move(-1))
        self.forward.on_click(lambda _: self._move(1))
        self._open()

    def _open(self) -> None:
        """A file: all its RL steps and questions can be chosen."""
        steps = sorted({h.rl_step for h in self.collection.files[self.file.value].headers} - {0})
        self._quiet = True
        self.rl_step.options = [("all", None), *((str(s), s) for s in steps)]
        self.rl_step.value = None
        self._quiet = False
        self._offer_questions()

    def _offer_questions(self) -> None:
        """The questions of the chosen RL step; the one that is chosen stays where it is among them."""
        if self._quiet:
            return
        found = self.collection.find(self.file.value, rl_step=self.rl_step.value)
        ids, chosen = sorted({h.question_id for h in found}), self.question.value
        self._quiet = True
        self.question.options = [("all", None), *((self.collection.question_label(i), i) for i in ids)]
        self.question.value = chosen if chosen in ids else None
        self._quiet = False
        self._list()

    def _list(self) -> None:
        """Fill the list with what is found; a search that cannot be read says why and changes nothing."""
        if self._quiet:
            return
        name = self.file.value
        try:
            found = self.collection.find(name, self.search.value, self.rl_step.value, self.question.value)
        except ValueError as e:
            self.says.value = f'<div style="{_SAYS};color:#d55e00">{escape(str(e))}</div>'
            return
        more = f", the first {MOST_LISTED} are listed" if len(found) > MOST_LISTED else ""
        n = len(self.collection.files[name])
        self.says.value = f'<div style="{_SAYS}">{len(found)} of {n} rollouts{more}</div>'
        self._quiet = True
        self.rollout.options = [(h.label, h) for h in found[:MOST_LISTED]]
        self.rollout.value = found[0] if found else None
        self._quiet = False
        self._choose()

    def _choose(self) -> None:
        if self._quiet:
            return
        header = self.rollout.value
        if header is None:
            self.left.value = self.siblings.value = self.link.value = ""
            self.cards.children = [self.left]
            return
        self._quiet = True
        name = self.file.value
        self.step.value, self.step.max = 0, max(0, self.collection.n_steps(name, header) - 1)
        others = [h for h in self.collection.files[name].group(header) if h.place != header.place]
        self.compare.options = [("nothing", None), *((h.label, h) for h in others)]
        self.compare.value = None
        self._quiet = False
        self.siblings.value = self.collection.siblings_html(name, header)
        self.link.value = self.collection.raw_link_html(name, header)
        self._draw()

    def _move(self, by: int) -> None:
        self.step.value = max(0, min(self.step.max, self.step.value + by))

    def _draw(self) -> None:
        if self._quiet or self.rollout.value is None:
            return
        name, header = self.file.value, self.rollout.value
        if self.show_raw.value:
            self.left.value = (
                f'<pre style="{_TEXT};background:#fff;color:#111">{escape(self.collection.raw(name, header))}</pre>'
            )
        else:
            self.left.value = self.collection.card(name, header, self.colour.value, self.step.value)
        other = self.compare.value
        if other is not None:
            self.right.value = self.collection.card(name, other, self.colour.value, self.step.value)
        self.cards.children = [self.left] if other is None else [self.left, self.right]


def explore(
    collection: Collection, search: str = "", colour_by: str = "entropy", name: str | None = None
) -> Explorer | None:
    """Show the explorer; in a batch, one rollout that the search finds, drawn once.

    Args:
        collection: what can be looked at. search: as in the search box. colour_by: a key of COLOURINGS. name: the file
            to begin with.
    """
    name = name or next(iter(collection.files))
    found = collection.find(name, search)
    still = collection.still_html(name, found[0], colour_by) if found else ""
    if os.environ.get(BATCH):
        plain = found[0].label if found else f"{name}: no rollout meets {search!r}"
        display({"text/html": still or escape(plain), "text/plain": plain}, raw=True)
        return None
    explorer = Explorer(collection, search, colour_by, name)
    show_widget(explorer, still)
    return explorer
