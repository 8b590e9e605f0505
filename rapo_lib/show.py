"""What a reader sees in a notebook: the live source of a function, and a rollout with its authors.

Text from models, tools and pages is never trusted: it is escaped, and characters that reorder or hide
text are shown as their code points.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable
from typing import Any

import pandas as pd
from IPython.display import display
from ipywidgets import DOMWidget
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from rapo_lib.config import ROOT
from rapo_lib.traces import Protocol, Rollout, Segment

#: Variable that the notebook driver sets: nobody is there to press buttons.
BATCH = "RAPO_BATCH"
#: Background and name of each author; the name stands in the picture too, so colour alone carries nothing.
AUTHORS = {"policy": ("#cfe3f5", "policy"), "tool": ("#e6e6e6", "tool"), "retrieval": ("#fbdcb8", "retrieved")}
#: Characters that reorder or hide text.
_INVISIBLE = {
    c: f"[U+{c:04X}]" for c in (*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF)
}
_BOX = (
    "font-family:monospace;font-size:12px;line-height:1.7;color:#111;background:#fff;padding:8px;"
    "white-space:pre-wrap;overflow-wrap:anywhere"
)


def _display(html_text: str, plain: str) -> None:
    display({"text/html": html_text, "text/plain": plain}, raw=True)


def show_widget(widget: DOMWidget, still: str) -> None:
    """Display a widget, and in its place a still picture wherever no kernel runs that could move it.

    The state of widgets is not saved in notebooks; an exported page shows `still`, HTML whose text is escaped.
    """
    display(widget._repr_mimebundle_() | {"text/html": still}, raw=True)


def escape(text: str) -> str:
    r"""Text that a browser shows as it is and never interprets.

    Example:
        >>> escape("<b>&\u202e")
        '&lt;b&gt;&amp;[U+202E]'
    """
    return html.escape(visible(text), quote=True)


def visible(text: str) -> str:
    r"""Text whose characters that reorder or hide others are shown as code points.

    Example:
        >>> visible("a\u202eb")
        'a[U+202E]b'
    """
    return text.translate(_INVISIBLE)


# --------------------------------------------------------------------------------------------- sources


def source_of(thing: Callable[..., Any] | type) -> tuple[str, str]:
    """(place, source) of a function or class, as it stands in the library now."""
    path, line = inspect.getsourcefile(thing), inspect.getsourcelines(thing)[1]
    place = path.removeprefix(f"{ROOT}/") if path else thing.__module__
    return f"{place}, line {max(line, 1)}", inspect.getsource(thing)


def show_source(thing: Callable[..., Any] | type) -> None:
    """Display the live, highlighted source of a function or class of the library."""
    place, source = source_of(thing)
    code = highlight(source, PythonLexer(), HtmlFormatter(noclasses=True, style="friendly", nobackground=True))
    head = f'<div style="font-size:12px;color:#555">{escape(place)}</div>'
    _display(
        f'{head}<div style="background:#f7f7f7;color:#111;padding:4px 8px;overflow-x:auto">{code}</div>',
        f"# {place}\n{source}",
    )


# -------------------------------------------------------------------------------------------- rollouts


def rollout_html(rollout: Rollout, protocol: Protocol) -> str:
    """A rollout as HTML: each segment on its author's colour, with what is known about it as a tooltip."""
    facts = [
        f"question {rollout.question_id}",
        "hybrid" if rollout.hybrid else "on-policy",
        f"ended by {rollout.end_reason or '(running)'}",
    ]
    facts += [f"reward {rollout.reward:g}"] if rollout.reward is not None else []
    facts += [f"{len(rollout.completion_ids)} tokens", f"retrieved fraction {rollout.retrieved_frac:.2f}"]
    legend = " ".join(
        f'<span style="background:{colour};padding:0 6px">{name}</span>' for colour, name in AUTHORS.values()
    )
    body = "".join(_segment_html(s, protocol) for s in rollout.segments)
    head = f'<div style="white-space:normal;color:#555">{escape(", ".join(facts))} &nbsp; {legend}</div>'
    return f'<div style="{_BOX}">{head}{body}</div>'


def _segment_html(segment: Segment, protocol: Protocol) -> str:
    colour, name = AUTHORS[segment.origin]
    known = [f"{name}, {len(segment.ids)} tokens"]
    known += [f"step entropy {segment.mean_entropy:.3f} nats"] if segment.entropies else []
    known += [f"{k}: {v}" for k, v in segment.info.items() if v is not None]
    text = escape(protocol.decode(segment.ids)).replace("&lt;", "<wbr>&lt;")
    lead = "" if segment.origin == "policy" else f'<span style="color:#666;font-size:10px"> {name} </span>'
    return f'{lead}<span style="background:{colour}" title="{escape("; ".join(known))}"><bdi>{text}</bdi></span>'


def show_rollout(rollout: Rollout, protocol: Protocol) -> None:
    """Display a rollout in colours: who wrote which ids."""
    plain = "\n".join(f"[{s.origin}] {protocol.decode(s.ids).translate(_INVISIBLE)}" for s in rollout.segments)
    _display(rollout_html(rollout, protocol), plain)


def aligned_rows(rollout: Rollout, protocol: Protocol) -> pd.DataFrame:
    """One row a completion token: step, id, token (as a Python string), origin, mask, log-probability, entropy."""
    steps = [i for i, step in enumerate(rollout.steps) for s in step.segments for _ in s.ids]
    ids = rollout.completion_ids
    origins = [s.origin for s in rollout.segments for _ in s.ids]
    mask = rollout.policy_mask

    def only_policy(values: list[float]) -> Any:
        return pd.array([v if m else None for v, m in zip(values, mask, strict=True)], dtype="Float64")

    return pd.DataFrame(
        {
            "step": steps,
            "id": ids,
            "token": [repr(protocol.decode([i]).translate(_INVISIBLE)) for i in ids],
            "origin": origins,
            "mask": mask,
            "logp": only_policy(rollout.logps),
            "entropy": only_policy(rollout.entropies),
        }
    )


def show_aligned_rows(rollout: Rollout, protocol: Protocol, n: int = 40) -> None:
    """Display the first n completion tokens with their id, author, mask and entropy."""
    table = aligned_rows(rollout, protocol)
    rows = []
    for r in table.head(n).itertuples():
        cells = (
            r.step,
            r.id,
            r.token,
            r.origin,
            r.mask,
            *("" if pd.isna(v) else f"{v:.3f}" for v in (r.logp, r.entropy)),
        )
        rows.append(
            f'<tr style="background:{AUTHORS[r.origin][0]}">'
            + "".join(f"<td>{escape(str(c))}</td>" for c in cells)
            + "</tr>"
        )
    head = "".join(
        f"<th>{c}</th>" for c in ("step", "id", "token", "origin", "mask", "log-probability (nats)", "entropy (nats)")
    )
    rest = f"<div>and {len(table) - n} more</div>" if len(table) > n else ""
    _display(
        f'<div style="{_BOX}"><table style="color:#111"><tr>{head}</tr>{"".join(rows)}</table>{rest}</div>',
        table.head(n).to_string(),
    )
