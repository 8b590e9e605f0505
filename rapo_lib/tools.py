"""The agent's tools: search, browse and python, and the toolbox that runs, counts and guards them.

Notebook 02 explains this module. Search is BM25 over document titles (bm25s) or a Search-R1-compatible server;
browse opens pages and follows their links; python runs in the sandbox. The paper's search is MiniLM over a
Wikipedia dump (arXiv 2603.03078, settings): that is what a server behind `HTTPSearchTool` can offer.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .pocket.files import POCKET, checked
from .sandbox import Sandbox, shared_sandbox
from .tasks import SPLITS, check_name
from .traces import ACTIONS, load_jsonl, write_text_atomic

#: Bytes that a search server may answer with; hundreds of queries with long passages stay far below.
MAX_REPLY_BYTES = 64 << 20
#: What a tool says when it looked and found nothing.
NONE = "none"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The observation of one call.

    Args:
        text: what the agent reads.
        ok: False when the call gave nothing: a wrong query as well as a broken tool.
        error: why, when it is not ok.
        transient: whether another try might end otherwise (a crash, a lost connection); never cached.
    """

    text: str
    ok: bool = True
    error: str | None = None
    transient: bool = field(default=False, repr=False)


def failed(error: str, text: str | None = None) -> ToolResult:
    """A failed call; the agent reads `error: ..` unless a text of its own is given."""
    return ToolResult(f"error: {error}" if text is None else text, ok=False, error=error)


class Tool(Protocol):
    """What a tool must have. `deterministic` tools have all results cached, others only those that are ok."""

    name: str
    deterministic: bool

    def run(self, queries: Sequence[str]) -> list[ToolResult]:
        """One result for each query."""

    def check(self) -> None:
        """Raise when the tool cannot work at all."""


# -------------------------------------------------------------------------------------------------- search

#: How often a word of a title counts where texts are searched, too.
TITLE_WEIGHT = 8
_WORD = re.compile(r"\w+")


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


class SearchTool:
    """BM25 over document titles, or over all of them; equal scores go to the lowest document id.

    Args:
        documents: rows with `title` and `text`.
        top_k: documents shown. With 1 the agent reads the text alone, with more `title: text` lines.
        over: `title` searches titles only, `all` titles and texts.

    Raises:
        ValueError: no documents, or a row without title or text.

    Example:
        >>> facts = {"capital of Mora": "Lumiro", "capital of Veka": "Tal"}
        >>> tool = SearchTool([{"title": title, "text": text} for title, text in facts.items()])
        >>> [r.text for r in tool.run(["capital of Veka", "xyz"])]
        ['Tal', 'none']
    """

    name = "search"
    deterministic = True

    def __init__(self, documents: Sequence[Mapping[str, str]], top_k: int = 1, over: str = "title") -> None:
        import bm25s

        check_name("value of over", over, ("title", "all"))

        if top_k < 1:
            raise ValueError(f"top_k is {top_k}; at least 1")
        for n, row in enumerate(documents):
            if not (isinstance(row.get("title"), str) and isinstance(row.get("text"), str)):
                raise ValueError(f"document {n} has no title or no text: {dict(row)!r}")
        words = [_words(d["title"]) for d in documents]
        if over == "all":  # a word of the title counts as often as TITLE_WEIGHT words of the text
            words = [w * TITLE_WEIGHT + _words(d["text"]) for w, d in zip(words, documents, strict=True)]
        if not any(words):
            raise ValueError("search has no document with a word in its title")
        self.top_k = top_k
        self._documents = documents
        index = bm25s.BM25(backend="numpy")
        index.index(words, show_progress=False)
        start, docs, data = (index.scores[k] for k in ("indptr", "indices", "data"))
        # One posting list a word; adding these is all that a query needs.
        self._postings = {
            w: (docs[start[i] : start[i + 1]], data[start[i] : start[i + 1]]) for w, i in index.vocab_dict.items() if w
        }

    def run(self, queries: Sequence[str]) -> list[ToolResult]:
        """The best documents for each query; `none` when no title shares a word with it."""
        return [self._show(self.top_ids(q)) for q in queries]

    def check(self) -> None:
        """Nothing can be missing once it is built."""

    def top_ids(self, query: str) -> list[int]:
        """Ids of the best documents, at most top_k, best first; those with score 0 are no hits."""
        return [i for i, _ in self.scored_ids(query, self.top_k)]

    def scored_ids(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """(id, BM25 score) of the best documents, best first; those with score 0 are no hits."""
        scores = np.zeros(len(self._documents), np.float32)  # (documents,)
        for word in _words(query):
            if word in self._postings:
                ids, values = self._postings[word]
                scores[ids] += values
        if top_k == 1:
            best = [int(scores.argmax())]  # argmax takes the first of equal ones
        else:
            best = np.argsort(-scores, kind="stable")[:top_k].tolist()
        return [(i, float(scores[i])) for i in best if scores[i] > 0]

    def _show(self, ids: list[int]) -> ToolResult:
        if not ids:
            return failed("no document matches", NONE)
        hits = [self._documents[i] for i in ids]
        if self.top_k == 1:
            return ToolResult(hits[0]["text"])
        return ToolResult("\n".join(f"{d['title']}: {d['text']}" for d in hits))


class HTTPSearchTool:
    """A Search-R1-compatible server: POST `{url}/retrieve` with queries, topk and return_scores.

    Args:
        url: address of the server, without `/retrieve`.
        top_k: documents a query.
        timeout_sec: seconds for one request.
        retries: further attempts after a time-out, a refused connection, or an answer 429 or 5xx.
        cache: folder in which answers are kept, for several processes and for later runs; None keeps none (a toolbox
            still remembers those of its own process).
    """

    name = "search"
    deterministic = False

    def __init__(
        self, url: str, top_k: int = 3, timeout_sec: float = 10.0, retries: int = 2, cache: Path | str | None = None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; it must start with http:// or https://")
        self.url = url.rstrip("/") + "/retrieve"
        self.top_k = top_k
        self.timeout_sec = timeout_sec
        self.retries = retries
        self.cache = Path(cache) if cache is not None else None

    def run(self, queries: Sequence[str]) -> list[ToolResult]:
        """One request for all queries that are not kept; when it fails, each of these gets the same named error."""
        kept = {q: self._recall(q) for q in queries} if self.cache else {}
        new = [q for q in dict.fromkeys(queries) if not kept.get(q)]
        try:
            found = dict(zip(new, map(self._show, self._retrieve(new)), strict=True)) if new else {}
        except (OSError, ValueError) as e:
            found = dict.fromkeys(new, failed(str(e)))
        else:
            self._keep(found)
        return [found[q] if q in found else kept[q] for q in queries]

    def _place(self, query: str) -> Path:
        key = json.dumps([self.url, self.top_k, query]).encode()
        return self.cache / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.json"

    def _recall(self, query: str) -> ToolResult | None:
        """A kept answer; a file that is damaged or about another query is as good as none."""
        try:
            row = json.loads(self._place(query).read_text(encoding="utf-8"))
            return ToolResult(row["text"], row["ok"], row["error"]) if row["query"] == query else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, found: Mapping[str, ToolResult]) -> None:
        for query, r in found.items() if self.cache else ():
            row = {"query": query, "text": r.text, "ok": r.ok, "error": r.error}
            write_text_atomic(self._place(query), json.dumps(row) + "\n")

    def check(self) -> None:
        """Raise RuntimeError when the server does not answer as it should."""
        try:
            self._retrieve(["test"])
        except (OSError, ValueError) as e:
            raise RuntimeError(f"search cannot work: {e}") from None

    def _retrieve(self, queries: Sequence[str]) -> list[list[Mapping[str, Any]]]:
        body = json.dumps({"queries": list(queries), "topk": self.top_k, "return_scores": True}).encode()
        result = self._post(body).get("result")
        if not isinstance(result, list) or len(result) != len(queries):
            raise ValueError(f"{self.url}: expected a `result` list of {len(queries)}, one entry a query")
        return result

    def _post(self, body: bytes) -> Mapping[str, Any]:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(0.2 * 2**attempt)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_sec) as reply:
                    data = reply.read(MAX_REPLY_BYTES + 1)
                break
            except urllib.error.HTTPError as e:
                error = f"{self.url} answered {e.code} {e.reason}"
                if e.code < 500 and e.code != 429:
                    raise OSError(error) from None
            except (OSError, http.client.HTTPException) as e:
                error = f"{self.url} did not answer: {getattr(e, 'reason', None) or e}"
        else:
            raise OSError(f"{error} ({self.retries + 1} attempts, {self.timeout_sec:g} s each)")
        return self._read(data)

    def _read(self, data: bytes) -> Mapping[str, Any]:
        if len(data) > MAX_REPLY_BYTES:
            raise ValueError(f"{self.url} answered with more than {MAX_REPLY_BYTES >> 20} MiB; ask for a smaller topk")
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{self.url} did not answer in JSON: {e}") from None
        if not isinstance(answer, dict):
            raise ValueError(f"{self.url} answered {type(answer).__name__}, expected an object with `result`")
        return answer

    def _show(self, hits: Any) -> ToolResult:
        if hits == []:
            return failed("no document matches", NONE)
        try:
            # With scores a hit is {"document": .., "score": ..}; some servers leave the wrapper out.
            contents = [(h.get("document") or h)["contents"] for h in hits]
        except (KeyError, TypeError, AttributeError):
            contents = [None]
        if not (isinstance(hits, list) and all(isinstance(c, str) for c in contents)):
            raise ValueError(f"{self.url}: expected a list of hits with a text document.contents, got {hits!r:.200}")
        lines = []
        for n, content in enumerate(contents, 1):
            title, _, text = content.partition("\n")
            lines.append(f"Doc {n} (Title: {title.strip()}) {text.strip()}")
        return ToolResult("\n".join(lines))


# -------------------------------------------------------------------------------------------------- browse


class BrowseTool:
    """Opens pages: `<title>`, `<entry> of <title>` or `<title> link <name>`.

    Args:
        pages: rows with `title`, `entries` (name -> text) and `links` (name -> text).

    Example:
        >>> tool = BrowseTool([{"title": "Kavelo", "entries": {"blog": "Mira"}, "links": {"second": "Tal"}}])
        >>> [r.text for r in tool.run(["blog of Kavelo", "Kavelo link second", "Kavelo", "Veka"])]
        ['Mira', 'Tal', 'Kavelo: entries blog; links second', 'none']
    """

    name = "browse"
    deterministic = True

    def __init__(self, pages: Sequence[Mapping[str, Any]]) -> None:
        self._pages: dict[str, Mapping[str, Any]] = {}
        for n, page in enumerate(pages):
            mappings = all(isinstance(page.get(k), Mapping) for k in ("entries", "links"))
            if not (mappings and isinstance(page.get("title"), str)):
                raise ValueError(f"page {n} needs title, entries and links: {dict(page)!r:.200}")
            for kind in ("entries", "links"):
                for name, text in page[kind].items():
                    if not isinstance(text, str):
                        raise ValueError(f"page {n}: {kind} {name!r:.60} is {text!r:.60}, expected a text")
            key = _plain(page["title"])
            if key in self._pages:
                raise ValueError(f"two pages have the title {page['title']!r}")
            parts = {kind: {_plain(k): v for k, v in page[kind].items()} for kind in ("entries", "links")}
            self._pages[key] = {"title": page["title"], **parts}
        if not self._pages:
            raise ValueError("browse has no pages")
        self._longest_title = max(map(len, self._pages))

    def run(self, queries: Sequence[str]) -> list[ToolResult]:
        """What each address shows; `none` when there is no such page, entry or link."""
        return [self._open(_plain(q)) for q in queries]

    def check(self) -> None:
        """Nothing can be missing once it is built."""

    def _open(self, address: str) -> ToolResult:
        if address in self._pages:
            page = self._pages[address]
            entries, links = (", ".join(page[kind]) or NONE for kind in ("entries", "links"))
            return ToolResult(f"{page['title']}: entries {entries}; links {links}")
        for kind, entry, title in _addresses(address, self._longest_title):
            page = self._pages.get(title)
            if page and entry in page[kind]:
                return ToolResult(page[kind][entry])
        return failed("no such page, entry or link", NONE)


def _addresses(address: str, longest_title: int) -> Iterator[tuple[str, str, str]]:
    """Every way to read an address: (entries or links, name, title); names and titles may hold `of` and `link`.

    Readings with a title that is longer than any page has are left out: of those there can be very many.
    """
    for m in re.finditer(" link ", address):
        if m.start() <= longest_title:
            yield "links", address[m.end() :], address[: m.start()]
    for m in re.finditer(" of ", address):
        if len(address) - m.end() <= longest_title:
            yield "entries", address[: m.start()], address[m.end() :]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


# -------------------------------------------------------------------------------------------------- python


class PythonTool:
    """Runs code in the sandbox; the agent reads what it printed, else the value of its last expression.

    Args:
        prelude: trusted source that is defined before the agent's code.
        sandbox: where it runs; by default the process's shared one.

    Example:
        >>> PythonTool("feet = 3").run(["42 + 17", "2 * feet"])
        [ToolResult(text='59', ok=True, error=None), ToolResult(text='6', ok=True, error=None)]
    """

    name = "python"
    deterministic = True

    def __init__(self, prelude: str = "", sandbox: Sandbox | None = None) -> None:
        self.prelude = prelude
        self._sandbox = sandbox or shared_sandbox()

    def run(self, queries: Sequence[str]) -> list[ToolResult]:
        """One result for each piece of code."""
        results = self._sandbox.run(queries, self.prelude)
        return [
            ToolResult(r.text, r.ok, None if r.ok else f"{r.outcome}: {r.text}", transient=r.outcome == "crash")
            for r in results
        ]

    def check(self) -> None:
        """Raise RuntimeError when the sandbox cannot start or the prelude fails."""
        try:
            (result,) = self.run(["6 * 7"])
        except (RuntimeError, ValueError, OSError) as e:
            raise RuntimeError(f"python cannot work: {e}") from None
        if result.text != "42":
            raise RuntimeError(f"python cannot work: 6 * 7 gave {result.text!r}")


# ------------------------------------------------------------------------------------------------- toolbox


@dataclass(slots=True)
class ToolCounts:
    """What one tool did so far: `cached` of its calls had been asked before."""

    calls: int = 0
    failures: int = 0
    cached: int = 0
    first_error: str | None = None

    @property
    def failures_frac(self) -> float:
        """Share of calls that failed; 0.0 without calls."""
        return self.failures / self.calls if self.calls else 0.0


class Toolbox:
    """The tools of an agent: runs batches of calls, caches, cuts long texts, counts failures.

    Args:
        tools: at most one for each action tag.
        max_observation_chars: longer texts (and errors) are cut, and say how much.
        warn_after: a tool whose first calls, this many, all fail gives a warning with the first real error.

    Raises:
        ValueError: no tools, two of one name, or a name that no action tag has.
        RuntimeError: a tool cannot work.

    Example:
        >>> box = Toolbox([SearchTool([{"title": "capital of Mora", "text": "Lumiro"}])])
        >>> [r.text for r in box.run([("search", "capital of Mora"), ("python", "1"), ("search", " ")])]
        ['Lumiro', 'error: there is no tool python; there is search', 'error: the search call is empty']
        >>> box.counts["search"].calls
        2
    """

    def __init__(self, tools: Sequence[Tool], max_observation_chars: int = 2000, warn_after: int = 20) -> None:
        if not tools:
            raise ValueError("a toolbox needs at least one tool")
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            check_name("tool", tool.name, ACTIONS)
            if tool.name in self._tools:
                raise ValueError(f"two tools are named {tool.name!r}")
            tool.check()
            self._tools[tool.name] = tool
        self.max_observation_chars = max_observation_chars
        self.warn_after = warn_after
        self.counts: dict[str, ToolCounts] = {name: ToolCounts() for name in self._tools}
        self.unknown_calls = 0
        self._cache: dict[tuple[str, str], ToolResult] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools, in the order given."""
        return tuple(self._tools)

    def require(self, names: Sequence[str]) -> None:
        """Raise RuntimeError unless all of these tools are here."""
        missing = [n for n in names if n not in self._tools]
        if missing:
            raise RuntimeError(f"tools missing: {', '.join(missing)}; the toolbox has {', '.join(self._tools)}")

    def run(self, calls: Sequence[tuple[str, str]]) -> list[ToolResult]:
        """One result for each (tool, query); equal calls run once."""
        new: dict[str, dict[str, None]] = {}
        for name, query in calls:
            if name in self._tools and query.strip() and (name, query) not in self._cache:
                new.setdefault(name, {})[query] = None
        fresh = {(n, q): r for n, queries in new.items() for q, r in self._run_tool(n, list(queries)).items()}
        results = [self._result(call, fresh) for call in calls]
        lasting = ((c, r) for c, r in fresh.items() if not r.transient)
        self._cache |= {call: r for call, r in lasting if r.ok or self._tools[call[0]].deterministic}
        return results

    def health(self) -> list[str]:
        """One sentence for each tool all of whose calls failed (`warn_after` or more)."""
        return [
            f"{name}: all {c.calls} calls failed; first error: {c.first_error}"
            for name, c in self.counts.items()
            if c.failures == c.calls >= self.warn_after
        ]

    def _result(self, call: tuple[str, str], fresh: Mapping[tuple[str, str], ToolResult]) -> ToolResult:
        name, query = call
        if name not in self._tools:
            self.unknown_calls += 1
            return failed(f"there is no tool {name}; there is {', '.join(self._tools)}")
        if call in self._cache:
            result, cached = self._cache[call], True
        else:
            result, cached = fresh.get(call) or failed(f"the {name} call is empty"), False
        self._count(name, result, cached)
        return result

    def _run_tool(self, name: str, queries: list[str]) -> dict[str, ToolResult]:
        try:
            results = list(self._tools[name].run(queries))
        except Exception as e:  # whatever a tool does, the rollout goes on and the failure is counted
            results = [replace(failed(f"{type(e).__name__}: {e}"), transient=True)] * len(queries)
        if len(results) != len(queries):
            raise RuntimeError(f"{name} gave {len(results)} results for {len(queries)} queries")
        return {q: self._cut(_checked_result(name, r)) for q, r in zip(queries, results, strict=True)}

    def _cut(self, result: ToolResult) -> ToolResult:
        return replace(result, text=self._short(result.text), error=result.error and self._short(result.error))

    def _short(self, text: str) -> str:
        over = len(text) - self.max_observation_chars
        return text if over <= 0 else f"{text[: self.max_observation_chars]} [{over} characters cut]"

    def _count(self, name: str, result: ToolResult, cached: bool) -> None:
        counts = self.counts[name]
        counts.calls += 1
        counts.cached += cached
        counts.failures += not result.ok
        if not result.ok and counts.first_error is None:
            counts.first_error = result.error
        if counts.calls == counts.failures == self.warn_after:
            warnings.warn("; ".join(h for h in self.health() if h.startswith(name)), RuntimeWarning, stacklevel=4)


def _checked_result(name: str, result: Any) -> ToolResult:
    """The result of a tool, or a failure when it is none."""
    if isinstance(result, ToolResult) and isinstance(result.text, str) and isinstance(result.error, str | None):
        return result
    return failed(f"{name} gave {result!r:.200}, expected a ToolResult with a text")


def make_pocket_toolbox(split: str) -> Toolbox:
    """Search, browse and python over the facts of one split of the pocket world.

    Raises:
        ValueError: an unknown split.
        FileNotFoundError: the pocket data are not there.
    """
    check_name("split", split, SPLITS)
    prelude = checked(POCKET / "python_prelude.py").read_text(encoding="utf-8")
    search = SearchTool(list(load_jsonl(checked(POCKET / "wiki" / f"{split}_documents.jsonl"))))
    browse = BrowseTool(list(load_jsonl(checked(POCKET / "wiki" / f"{split}_pages.jsonl"))))
    return Toolbox([search, browse, PythonTool(prelude)])
