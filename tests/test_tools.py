"""Search, browse, python and the toolbox around them."""

import json
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rapo_lib.sandbox import Sandbox, SandboxLimits
from rapo_lib.tools import (
    BrowseTool,
    HTTPSearchTool,
    PythonTool,
    SearchTool,
    Toolbox,
    ToolResult,
    failed,
    make_pocket_toolbox,
)

DOCUMENTS = [
    {"title": "capital of Mora", "text": "Lumiro"},
    {"title": "capital of Veka", "text": "Tal"},
    {"title": "mayor of Veka", "text": "Sanu"},
    {"title": "code 42 hotel", "text": "Riva"},
]
PAGES = [
    {"title": "Kavelo", "entries": {"blog": "Mira", "table of points": "7"}, "links": {"second": "Tal"}},
    {"title": "House of Veka", "entries": {"blog": "Sanu"}, "links": {}},
]


class FakeTool:
    """A tool that gives what it is told and remembers what it was asked."""

    deterministic = True

    def __init__(self, name="search", give=lambda q: ToolResult(q.upper())):
        self.name, self.give, self.asked = name, give, []

    def run(self, queries):
        self.asked.append(list(queries))
        return [self.give(q) for q in queries]

    def check(self):
        pass


def texts(tool, *queries):
    return [r.text for r in tool.run(queries)]


def test_search_finds_by_title_and_ties_go_to_the_lowest_id():
    tool = SearchTool(DOCUMENTS)
    assert texts(tool, "capital of Veka", "MORA", "hotel 42", "mayor") == ["Tal", "Lumiro", "Riva", "Sanu"]
    assert texts(tool, "capital", "Veka") == ["Lumiro", "Tal"]
    assert tool.run(["zzz"]) == [ToolResult("none", ok=False, error="no document matches")]


def test_search_shows_titles_when_it_shows_more_than_one():
    tool = SearchTool(DOCUMENTS, top_k=3)
    assert texts(tool, "capital of Veka") == ["capital of Veka: Tal\ncapital of Mora: Lumiro\nmayor of Veka: Sanu"]
    assert texts(tool, "Veka") == ["capital of Veka: Tal\nmayor of Veka: Sanu"]


def test_search_scores_are_those_of_bm25s():
    import bm25s
    import numpy as np

    tool = SearchTool(DOCUMENTS, top_k=4)
    index = bm25s.BM25(backend="numpy")
    index.index([d["title"].casefold().split() for d in DOCUMENTS], show_progress=False)
    for query in ("capital of Veka", "mayor of Mora", "42"):
        scores = index.get_scores(query.casefold().split())
        order = [int(i) for i in np.argsort(-scores, kind="stable") if scores[i] > 0]
        assert tool.top_ids(query) == order


def test_search_refuses_what_it_cannot_search():
    with pytest.raises(ValueError, match="no document with a word"):
        SearchTool([])
    with pytest.raises(ValueError, match="document 0 has no title or no text"):
        SearchTool([{"title": "a"}])
    with pytest.raises(ValueError, match="top_k is 0"):
        SearchTool(DOCUMENTS, top_k=0)


def test_browse_reads_pages_entries_and_links():
    tool = BrowseTool(PAGES)
    assert texts(tool, "blog of Kavelo", "kavelo  LINK second", "blog of House of Veka") == ["Mira", "Tal", "Sanu"]
    assert texts(tool, "table of points of Kavelo") == ["7"]
    assert texts(tool, "House of Veka") == ["House of Veka: entries blog; links none"]
    for address in ("blog of Nobody", "Kavelo link third", "Nobody", "second of Kavelo"):
        assert tool.run([address]) == [ToolResult("none", ok=False, error="no such page, entry or link")]
    with pytest.raises(ValueError, match="two pages have the title"):
        BrowseTool([PAGES[0], PAGES[0]])


def test_python_tool_uses_its_prelude_and_names_failures():
    sandbox = Sandbox(SandboxLimits(time_sec=0.3))
    tool = PythonTool("feet = 3\ndef convert(v, unit):\n    return v * unit", sandbox)
    assert texts(tool, "convert(42, feet)", "42 + 17") == ["126", "59"]
    (result,) = tool.run(["while True: pass"])
    assert not result.ok and result.error.startswith("time: ") and result.text == "error: time limit of 0.3 s exceeded"
    sandbox.close()


def test_toolbox_runs_a_batch_in_order_and_each_query_once():
    search, python = FakeTool("search"), FakeTool("python", lambda q: ToolResult(f"={q}"))
    box = Toolbox([search, python])
    got = box.run([("search", "a"), ("python", "1"), ("search", "a"), ("search", "b")])
    assert [r.text for r in got] == ["A", "=1", "A", "B"]
    assert search.asked == [["a", "b"]] and python.asked == [["1"]]
    assert [r.text for r in box.run([("search", "b"), ("search", "c")])] == ["B", "C"]
    assert search.asked[1:] == [["c"]]
    assert (box.counts["search"].calls, box.counts["search"].cached, box.counts["search"].failures) == (5, 1, 0)
    assert box.names == ("search", "python")


def test_long_observations_say_how_much_was_cut():
    box = Toolbox([FakeTool(give=lambda q: ToolResult("x" * 130))], max_observation_chars=100)
    assert box.run([("search", "a")])[0].text == "x" * 100 + " [30 characters cut]"


def test_toolbox_refuses_nonsense():
    with pytest.raises(ValueError, match="at least one tool"):
        Toolbox([])
    with pytest.raises(ValueError, match="two tools are named 'search'"):
        Toolbox([FakeTool(), FakeTool()])
    with pytest.raises(ValueError, match="unknown tool 'sing'; allowed: search, browse, python"):
        Toolbox([FakeTool("sing")])


@pytest.mark.case(36)
def test_a_tool_that_always_fails_warns_with_the_first_real_error():
    def broken(query):
        raise ConnectionError(f"no route to the corpus for {query}")

    box = Toolbox([FakeTool(give=broken), FakeTool("python")], warn_after=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        box.run([("search", f"q{i}") for i in range(4)] + [("python", "1")])
    assert box.health() == []
    with pytest.warns(RuntimeWarning, match="search: all 5 calls failed; first error: ConnectionError: .* for q0"):
        box.run([("search", "q9")])
    assert box.health() == ["search: all 5 calls failed; first error: ConnectionError: no route to the corpus for q0"]
    assert box.counts["search"].failures_frac == 1.0 and box.counts["python"].failures_frac == 0.0


@pytest.mark.case(36)
def test_a_tool_that_works_now_and_then_gives_no_warning():
    box = Toolbox([FakeTool(give=lambda q: ToolResult(q, ok=q == "good"))], warn_after=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        box.run([("search", q) for q in ("bad1", "good", "bad2", "bad3", "bad4")])
    assert box.health() == [] and box.counts["search"].failures == 4


@pytest.mark.case(36)
def test_a_missing_tool_refuses_to_start(monkeypatch):
    monkeypatch.setenv("MONTY_BIN", "/nonexistent/monty")
    with pytest.raises(RuntimeError, match="python cannot work: the interpreter cannot be started"):
        Toolbox([PythonTool(sandbox=Sandbox())])
    with pytest.raises(RuntimeError, match="search cannot work: .* did not answer"):
        Toolbox([HTTPSearchTool("http://127.0.0.1:9", timeout_sec=0.2, retries=0)])
    with pytest.raises(RuntimeError, match="tools missing: browse; the toolbox has search"):
        Toolbox([FakeTool()]).require(["search", "browse"])


@pytest.mark.case(37)
def test_an_empty_action_or_an_unknown_tool_gets_an_error_result():
    box = Toolbox([FakeTool()])
    empty, unknown = box.run([("search", "  \n"), ("python", "1")])
    assert empty == ToolResult("error: the search call is empty", ok=False, error="the search call is empty")
    assert unknown.text == "error: there is no tool python; there is search" and not unknown.ok
    assert box.counts["search"].failures == 1 and box.unknown_calls == 1


@pytest.mark.case(37)
def test_the_same_query_three_times_is_counted():
    box = Toolbox([FakeTool()])
    for _ in range(3):
        box.run([("search", "a")])
    assert (box.counts["search"].calls, box.counts["search"].cached) == (3, 2)


def test_pocket_toolbox_names_an_unknown_split():
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        make_pocket_toolbox("dev")


# ---------------------------------------------------------------------------------- a server on loopback


class FakeServer:
    """Search-R1's interface; `plan` says for each request: a status code, "slow", "text" or "ok"."""

    def __init__(self):
        self.plan, self.seen = [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append((self.path, request))
                step = outer.plan.pop(0) if outer.plan else "ok"
                if step == "slow":
                    time.sleep(0.6)
                hit = {"document": {"id": "1", "contents": '"Mora"\nits capital is Lumiro'}, "score": 1.5}
                result = [[hit] * request["topk"] if q != "none" else [] for q in request["queries"]]
                body = b"oops" if step == "text" else json.dumps({"result": result}).encode()
                self.send_response(step if isinstance(step, int) else 200)
                self.end_headers()
                try:
                    self.wfile.write(body)
                except OSError:
                    pass  # the client of a slow reply has gone

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server():
    fake = FakeServer()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def test_http_search_speaks_the_search_r1_interface(server):
    tool = HTTPSearchTool(server.url + "/", top_k=2)
    got = tool.run(["capital", "none"])
    line = 'Doc {} (Title: "Mora") its capital is Lumiro'
    assert got[0] == ToolResult(line.format(1) + "\n" + line.format(2))
    assert got[1] == ToolResult("none", ok=False, error="no document matches")
    assert server.seen == [("/retrieve", {"queries": ["capital", "none"], "topk": 2, "return_scores": True})]


def test_http_search_tries_again_and_then_names_the_error(server):
    tool = HTTPSearchTool(server.url, timeout_sec=0.3, retries=1)
    server.plan = [503, "ok", "slow", "ok", 503, 503, 404, "text"]
    assert tool.run(["a"])[0].ok
    assert tool.run(["a"])[0].ok
    for message in ("answered 503", "answered 404", "did not answer in JSON"):
        (result,) = tool.run(["a"])
        assert not result.ok and message in result.error and server.url in result.text
    assert len(server.seen) == 8


@pytest.mark.case(36)
def test_http_failures_are_not_cached(server):
    box = Toolbox([HTTPSearchTool(server.url, retries=0)])
    server.plan = [503]
    assert [box.run([("search", "a")])[0].ok for _ in range(3)] == [False, True, True]
    assert len(server.seen) == 3  # the check, the failure, the success


def test_a_failure_that_may_pass_is_not_cached():
    """A crash or a lost connection is asked again; what a deterministic tool cannot do is not."""
    answers = iter([failed("no such page", "none"), ToolResult("error: crashed", False, "crash", transient=True)])

    class Once(BrowseTool):
        def run(self, queries):
            return [next(answers, ToolResult("fine")) for _ in queries]

    box = Toolbox([Once([{"title": "a", "entries": {}, "links": {}}])])
    assert [box.run([("browse", q)])[0].text for q in ("x", "y", "x", "y", "y")] == [
        "none",
        "error: crashed",
        "none",
        "fine",
        "fine",
    ]

    class Raises(BrowseTool):
        def run(self, queries):
            if next(fails):
                raise ConnectionError("port 8000")
            return [ToolResult("back") for _ in queries]

    fails = iter([True, False])
    box = Toolbox([Raises([{"title": "a", "entries": {}, "links": {}}])])
    assert [box.run([("browse", "x")])[0].text for _ in range(2)] == ["error: ConnectionError: port 8000", "back"]
