r"""What an answer is worth: format, exact match, F1, mathematical equality, and the outcome rewards.

Notebook 01 explains this module. Numbers are compared exactly by our own reader first; a kept library
(math-verify) is asked only about LaTeX-like answers, in a process that is killed when it takes too long.

Deviations from arXiv 2603.03078:
1. The pocket reward is 1 or 0. The released one (-1 for broken format, F1, +0.1) is `released_reward`.
2. `50%` is 0.5 and not 50; `12:30` and other times are compared as text.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache

from .tasks import Question
from .traces import ParsedStep, Protocol, Rollout, nfkc, parse_step
from .workers import Worker, serve

#: Seconds that math-verify may take for one pair.
MATH_LIMIT_SEC = 2.0

# -------------------------------------------------------------------------------------------------- boxed

# Here and below `*+` repeats never give back: a policy may write any number of spaces or digits.
_BOX = re.compile(r"\\boxed\s*+\{")


def extract_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{..}`, braces balanced; None when there is none or it never closes.

    Example:
        >>> extract_boxed(r"\boxed{1} or \boxed{\frac{1}{2}}")
        '\\frac{1}{2}'
    """
    boxes = deque(_BOX.finditer(text), maxlen=1)
    if not boxes:
        return None
    start = boxes[0].end()
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i].strip()
    return None


# --------------------------------------------------------------------------------------------------- text

_MINUS = str.maketrans({**dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"), "\u2044": "/"})
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_VULGAR = re.compile("(?<=\\d)(?=[\u00bc-\u00be\u2150-\u215e])")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# Punctuation goes, except what belongs to a number, a time or a power: 3.14, -5, 12:30, 1/2, 50%, 2^10.
_PUNCTUATION = re.compile(
    r"(?P<between>(?<=\d)(?:[^\w\s.:/*+=^%]|[^\w\s^]{2,})(?=\d))"
    r"|(?<=\d)[.:/*+=](?=\d)|(?<!\w)-(?=\s*+(?:[$\u20ac\u00a3]\s*+)?\.?\d)|(?<![\w.])\.(?=\d)"
    r"|(?:(?<=\d)|(?<=\d\.))%|(?<=\de)-(?=\d)|\^"
    r"|(?P<drop>[^\w\s])"
)


def _plain(text: str) -> str:
    r"""One kind of minus, digit and space; no `\text`, no thousands separators; a raised 2 becomes ^{2}."""
    text = _VULGAR.sub(" ", _SUPERSCRIPT.sub(lambda m: f"^{{{m[0]}}}", text))
    text = _TEXT_COMMAND.sub(r"\1", text)
    text = nfkc(text).translate(_MINUS).strip()
    text = re.sub(r"(?<=\d)\s+%", "%", text)
    return _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)


def _without_mark(m: re.Match[str]) -> str:
    if m["between"]:
        return " -" if m[0][1:].endswith("-") else " "
    return "" if m["drop"] else m[0]


@lru_cache(maxsize=65_536)
def normalise_answer(text: str) -> str:
    """SQuAD's normalisation (case, punctuation, articles, white space), which here leaves numbers whole.

    A text of articles alone (`A` as the letter of a choice) stays.

    Example:
        >>> [normalise_answer(t) for t in ("The  Beatles!", "1,000", "-3.14", "(A)")]
        ['beatles', '1000', '-3.14', 'a']
    """
    text = " ".join(_PUNCTUATION.sub(_without_mark, _plain(text).casefold()).split())
    return " ".join(_ARTICLES.sub(" ", text).split()) or text


def exact_match(pred: str, gold: str) -> bool:
    """Whether both are the same normalised text; an empty one equals nothing.

    Example:
        >>> exact_match("The Beatles", "beatles"), exact_match("3.14", "314"), exact_match("", "")
        (True, False, False)
    """
    pred = normalise_answer(pred)
    return pred != "" and pred == normalise_answer(gold)


def f1(pred: str, gold: str) -> float:
    """Token F1 of the normalised texts.

    Equation: 2 P R / (P + R), P and R the shares of predicted and gold tokens that the other one holds.

    Example:
        >>> round(f1("Paris or London or Rome", "London"), 4)
        0.3333
    """
    p, g = normalise_answer(pred).split(), normalise_answer(gold).split()
    common = sum((Counter(p) & Counter(g)).values())
    return 2 * common / (len(p) + len(g)) if common else 0.0


# ------------------------------------------------------------------------------------------------ numbers

_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*[$\u20ac\u00a3]?\s*(?:(?P<whole>\d+)\s+(?=\d+/\d))?"
    r"(?:(?P<num>\d+)/(?P<den>\d+)|(?P<dec>\d+\.?\d*|\.\d+)"
    r"(?:e(?P<exp>[-+]?\d{1,3})|\s*[x*]\s*10\s*\^\s*(?P<pow>[-+]?\d{1,3}))?)"
    r"\s*(?P<percent>%?)\s*[\u20ac\u00a3]?"
)
_BRACED_POWER = re.compile(r"10\^\{([-+]?\d+)\}")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_TIME = re.compile(r"\d\s*+:\s*+\d")


@lru_cache(maxsize=65_536)
def parse_number(text: str) -> Fraction | None:
    r"""The exact value of a plain number, None when the text is anything else.

    Reads Unicode minus, thousands separators, `1e3`, `6.02 x 10^23`, `1/2`, `2 2/3`, `\frac{1}{2}`, `50%`
    (a half) and a currency sign in front. `12:30` and `3,5` are no numbers.

    Example:
        >>> parse_number("2 2/3"), parse_number("1,000.50"), parse_number("12:30")
        (Fraction(8, 3), Fraction(2001, 2), None)
    """
    if len(text) > 200:
        return None
    text = _plain(text).strip("$ ").replace("\u00d7", "x").replace(r"\times", "x").replace(r"\%", "%")
    text = text.removeprefix(r"\(").removesuffix(r"\)").replace(r"\,", "").replace("{,}", "")
    text = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", text)
    text = _BRACED_POWER.sub(r"10^\1", text).rstrip(".")
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    m = _NUMBER.fullmatch(text.strip("$ ").casefold())
    if m is None or (m["den"] and int(m["den"]) == 0):
        return None
    value = Fraction(int(m["num"]), int(m["den"])) if m["num"] else Fraction(m["dec"])
    value = (value + int(m["whole"] or 0)) * Fraction(10) ** int(m["exp"] or m["pow"] or 0)
    value = value / 100 if m["percent"] else value
    return -value if m["sign"] == "-" else value


# ----------------------------------------------------------------------------------------------- equality

_MATH = re.compile(r"[\\^{}]|\b[a-z]\s*=|sqrt|\d\s*[*()]|[(]\s*-?\d|\u221a", re.IGNORECASE)
_WORD = re.compile(r"(?<!\\)\b(?!sqrt|sin|cos|tan|log|exp)[^\W\d_]{3,}")


def _is_math(text: str) -> bool:
    """Whether math-verify should be asked: formulas, but no times and no words (it reads the last number only)."""
    return bool(_MATH.search(text)) and not (_TIME.search(text) or _WORD.search(text))


@lru_cache(maxsize=65_536)
def answers_equal(pred: str, gold: str) -> bool:
    r"""Whether two answers mean the same: as numbers, else as text, else (LaTeX-like ones) as mathematics.

    Args:
        pred: the policy's answer.
        gold: one gold answer.

    Example:
        >>> answers_equal("1e3", "1,000"), answers_equal(r"\frac{1}{2}", "0.5")
        (True, True)
        >>> answers_equal("-5", "5"), answers_equal("12:30", "12:45")
        (False, False)
    """
    if not pred.strip() or not gold.strip():
        return False
    a, b = parse_number(pred), parse_number(gold)
    if a is not None and b is not None:
        return a == b
    pred, gold = _plain(pred), _plain(gold)
    if _is_math(f"{pred} {gold}"):
        return pred == gold or math_equal(pred, gold)
    return exact_match(pred, gold)


@lru_cache(maxsize=65_536)
def math_equal(pred: str, gold: str) -> bool:
    r"""Whether math-verify finds both equal, within `MATH_LIMIT_SEC`; False when it cannot tell by then.

    It runs in a process of its own, so the limit also holds in a thread, where its own time-out (an alarm
    signal) does not work.
    """
    if max(len(pred), len(gold)) > 2000:
        return False
    (reply,) = _math_worker().ask([[pred, gold]], MATH_LIMIT_SEC)
    return bool(reply)


@cache
def _math_worker() -> Worker:
    return Worker("rapo_lib.rewards")


def _verify(request: Sequence[str]) -> bool:
    """The worker's side of `math_equal`."""
    from math_verify import parse, verify

    pred, gold = (parse(f"${t}$", parsing_timeout=None) for t in request)
    return bool(pred and gold) and verify(gold, pred, timeout_seconds=None)


# ------------------------------------------------------------------------------------------------ rollouts


def answer_text(rollout: Rollout, protocol: Protocol) -> str | None:
    """The boxed answer in the rollout's last policy segment; None when there is none.

    Nothing else is read: a gold answer inside `<result>` or `<retrieve>` was not written by the policy.
    """
    if not rollout.segments or rollout.segments[-1].origin != "policy":
        return None
    answer = _parsed(protocol, rollout.segments[-1].ids).answer
    return None if answer is None else extract_boxed(answer)


def format_ok(rollout: Rollout, protocol: Protocol) -> bool:
    """Whether the rollout ended with a boxed answer and every own step before it is one valid action.

    A prompt that already ends in `<think>` is no fault: the opening tag may be missing.
    """
    if rollout.end_reason != "answer" or answer_text(rollout, protocol) is None:
        return False
    own = [s for s in rollout.segments if s.origin == "policy"]
    return all(_parsed(protocol, s.ids).action for s in own[:-1])


@lru_cache(maxsize=65_536)
def _parsed(protocol: Protocol, ids: tuple[int, ...]) -> ParsedStep:
    """A policy segment as a step; rollouts of a group share many of them."""
    return parse_step(protocol.step_text(ids))


def pocket_reward(rollout: Rollout, question: Question, protocol: Protocol) -> float:
    """1.0 when the format is valid and the boxed answer equals a gold one, else 0.0."""
    if rollout.end_reason != "answer":
        return 0.0
    answer = answer_text(rollout, protocol)
    right = answer is not None and any(answers_equal(answer, gold) for gold in question.answers)
    return float(right and format_ok(rollout, protocol))


def released_reward(rollout: Rollout, question: Question, protocol: Protocol) -> float:
    """The released code's reward: -1 for broken format, else token F1, +0.1 for a right answer with both tools.

    Source: arXiv 2603.03078, released code. Both tools are `search` and `python`; right means that the
    answer equals a gold one.
    """
    if not format_ok(rollout, protocol):
        return -1.0
    answer = answer_text(rollout, protocol) or ""
    used = {s.info["tool"] for s in rollout.tool_calls}
    right = any(answers_equal(answer, gold) for gold in question.answers)
    return max(f1(answer, gold) for gold in question.answers) + 0.1 * (right and {"search", "python"} <= used)


Reward = Callable[[Rollout, Question, Protocol], float]
#: Outcome rewards by the name that `RunConfig.reward` has.
REWARDS: Mapping[str, Reward] = {"pocket": pocket_reward, "released": released_reward}


def get_reward(name: str) -> Reward:
    """The outcome reward of that name.

    Raises:
        ValueError: an unknown name; the message lists the valid ones.
    """
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; allowed: {', '.join(REWARDS)}")
    return REWARDS[name]


if __name__ == "__main__":
    _verify(["x^2", r"\sqrt{2}"])  # imports and the first parse take a second that belongs to no answer
    serve(_verify, cpu_sec=MATH_LIMIT_SEC + 1)
