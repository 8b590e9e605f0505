"""A search server on this machine: `python -m rapo_lib.serve pocket|world|FILE.jsonl|BUFFER_FOLDER --port 8000`.

It speaks Search-R1's interface, so that several trainers share one index: `POST /retrieve` with `queries`, `topk` and
`return_scores` answers `{"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.2}, ..], ..]}`, a list for
each query. Documents are ranked by BM25, or by an encoder (`--by minilm`: by meaning).
`GET /health` says what is served. `tools.HTTPSearchTool` is the client.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from rapo_lib.buffer import ENCODERS, Encoder, StepTraceBuffer, make_encoder, make_index
from rapo_lib.embeddings import EMBEDDINGS, encode_texts
from rapo_lib.facts import load_facts_documents
from rapo_lib.pocket.files import POCKET, checked
from rapo_lib.tasks import check_name
from rapo_lib.tools import SearchTool
from rapo_lib.traces import load_jsonl

#: Limits of one request: bytes, queries, characters of a query, documents.
MAX_BYTES, MAX_QUERIES, MAX_QUERY, MAX_TOPK = 1 << 22, 1024, 8192, 100
#: A request that does not come in this many seconds is given up.
TIMEOUT_SEC = 30
#: How documents can be ranked: BM25 counts words, an encoder compares meanings.
BM25 = "bm25"
RANKINGS = (BM25, *ENCODERS)
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Hits = list[dict[str, Any]]
#: (queries, topk) -> for each query its hits, best first.
Search = Callable[[Sequence[str], int], list[Hits]]


def corpus_search(documents: Sequence[Mapping[str, str]], over: str = "all") -> Search:
    """BM25 over documents with `title` and `text`, as `tools.SearchTool` ranks them."""
    tool = SearchTool(documents, over=over)

    def search(queries: Sequence[str], topk: int) -> list[Hits]:
        found = [tool.scored_ids(q, topk) for q in queries]
        contents = [f"{d['title']}\n{d['text']}" for d in documents]
        return [[{"document": {"contents": contents[i]}, "score": s} for i, s in hits] for hits in found]

    return search


def nearest_search(documents: Sequence[Mapping[str, str]], encoder: Encoder, cache: Path | None = None) -> Search:
    """Documents whose title and text lie nearest to the query, by the cosine of an encoder's vectors.

    Args:
        documents: rows with `title` and `text`. encoder: fitted on them here. cache: folder in which the vectors of a
            costly encoder are kept.

    Edge cases: a query that says nothing to the encoder has no hits.
    """
    contents = [f"{d['title']}\n{d['text']}" for d in documents]
    encoder.fit(contents)
    index = make_index("exact", encode_texts(encoder, contents, cache))
    lock = Lock()  # encoders keep a cache and are no more than one thread's

    def search(queries: Sequence[str], topk: int) -> list[Hits]:
        with lock:
            scores, ids = index.search(encoder.encode(queries), min(topk, len(contents)))
        rows = [[(i, float(s)) for i, s in zip(*row, strict=True) if s > 0] for row in zip(ids, scores, strict=True)]
        return [[{"document": {"contents": contents[i]}, "score": s} for i, s in hits] for hits in rows]

    return search


def buffer_search(buffer: StepTraceBuffer) -> Search:
    """Nearest step traces of a buffer: the title is the last line of the key, the text is the value."""
    lock = Lock()  # encoders keep a cache and are no more than one thread's

    def search(queries: Sequence[str], topk: int) -> list[Hits]:
        with lock:
            found = buffer.search(queries, topk)
        traces = buffer.traces
        rows = [[(traces[h.trace_id], float(h.score)) for h in hits] for hits in found]
        return [
            [{"document": {"contents": f"{t.key.splitlines()[-1]}\n{t.value}"}, "score": s} for t, s in hits]
            for hits in rows
        ]

    return search


def load_search(source: str, by: str = BM25) -> tuple[Search, str]:
    """What to serve: `pocket` or `pocket:validation`, `world`, a JSONL file of documents, or a saved buffer's folder.

    Args:
        source: one of these. by: `bm25`, or the encoder that ranks documents. A buffer is always searched by its own.

    Returns:
        The search, and a few words on what it searches.

    Raises:
        ValueError: a source that is none of these, an unknown ranking, or a buffer with another one than its own.
        ImportError: the encoder's extra is not installed.
    """
    check_name("value of --by", by, RANKINGS)
    name, _, split = source.partition(":")
    if name == "pocket":
        documents = list(load_jsonl(checked(POCKET / "wiki" / f"{split or 'train'}_documents.jsonl")))
        return _ranked(documents, by, "title"), f"{len(documents)} documents of the pocket world, by {by}"
    if source == "world":
        documents = load_facts_documents()
        return _ranked(documents, by), f"{len(documents)} documents about countries, by {by}"
    path = Path(source)
    if path.is_dir():
        if by != BM25:
            raise ValueError(f"{path} is searched by its own encoder; leave --by {by} out")
        buffer = StepTraceBuffer.load(path)
        return buffer_search(buffer), f"{len(buffer)} step traces"
    if path.suffix == ".jsonl" and path.is_file():
        documents = [_document(row, f"{path}, line {n}") for n, row in enumerate(load_jsonl(path), 1)]
        return _ranked(documents, by), f"{len(documents)} documents of {path.name}, by {by}"
    raise ValueError(
        f"nothing to serve at {source!r}; allowed: pocket, pocket:validation, pocket:test, world, a .jsonl file with "
        "title and text (or contents) in each line, or the folder of a saved step-trace buffer"
    )


def _ranked(documents: Sequence[Mapping[str, str]], by: str, over: str = "all") -> Search:
    if by == BM25:
        return corpus_search(documents, over)
    return nearest_search(documents, make_encoder(by), EMBEDDINGS)


def _document(row: Mapping[str, Any], where: str) -> dict[str, str]:
    """A row with title and text, or Search-R1's `contents` (a title, a line break, the text)."""
    if isinstance(row.get("contents"), str):
        title, _, text = row["contents"].partition("\n")
        return {"title": title.strip('"'), "text": text}
    if isinstance(row.get("title"), str) and isinstance(row.get("text"), str):
        return {"title": row["title"], "text": row["text"]}
    raise ValueError(f"{where}: needs title and text, or contents; it has {', '.join(row) or 'nothing'}")


def make_server(search: Search, about: str, port: int = 0, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """A server that is bound and not yet started: call serve_forever(), later shutdown() and server_close().

    Args:
        search: answers. about: what /health says. port: 0 takes a free one (see `server_address`). host: its address.
    """
    server = ThreadingHTTPServer(
        (host, port), type("Handler", (_Handler,), {"search": staticmethod(search), "about": about})
    )
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    """One connection; every fault of a request is an answer that names it, and nothing else."""

    search: Search
    about: str
    timeout = TIMEOUT_SEC
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok", "serves": self.about})
        else:
            self._answer(404, {"error": f"unknown path {self.path}; allowed: GET /health, POST /retrieve"})

    def do_POST(self) -> None:
        if self.path != "/retrieve":
            self.close_connection = True  # its body is not read
            return self._answer(404, {"error": f"unknown path {self.path}; allowed: GET /health, POST /retrieve"})
        try:
            queries, topk, scores = read_request(self._body())
        except ValueError as e:
            self.close_connection = True
            return self._answer(400, {"error": str(e)})
        hits = self.search(queries, topk)
        plain = [[h["document"] for h in of_one] for of_one in hits]
        self._answer(200, {"result": hits if scores else plain})

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BYTES:
            raise ValueError(f"Content-Length is {length!r}; a number up to {MAX_BYTES} is expected")
        return self.rfile.read(int(length))

    def _answer(self, status: int, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """No line a request: a training run sends thousands."""


def read_request(body: bytes) -> tuple[list[str], int, bool]:
    """Queries, topk and return_scores of a request.

    Raises:
        ValueError: says what came and what is allowed.

    Example:
        >>> read_request(b'{"queries": ["a"], "topk": 2}')
        (['a'], 2, False)
    """
    try:
        row = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"the body is no JSON: {e}") from None
    queries = row.get("queries") if isinstance(row, dict) else None
    if not isinstance(queries, list) or not 0 < len(queries) <= MAX_QUERIES:
        raise ValueError(f"queries has to be a list of 1 to {MAX_QUERIES} texts")
    if not all(isinstance(q, str) and len(q) <= MAX_QUERY for q in queries):
        raise ValueError(f"every query has to be a text of at most {MAX_QUERY} characters")
    topk, scores = row.get("topk", 3), row.get("return_scores", False)
    if type(topk) is not int or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk is {topk!r}; a whole number from 1 to {MAX_TOPK} is expected")
    if type(scores) is not bool:
        raise ValueError(f"return_scores is {scores!r}; true or false is expected")
    return queries, topk, scores


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m rapo_lib.serve", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="pocket, pocket:validation, world, a .jsonl file, or a buffer's folder")
    parser.add_argument("--by", default=BM25, help=f"ranking of documents: {', '.join(RANKINGS)}")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--public", action="store_true", help="allow an address that other machines reach")
    a = parser.parse_args(arguments)
    if a.host not in LOOPBACK and not a.public:
        parser.error(
            f"--host {a.host} can be reached by others, and whoever reaches it may ask; add --public to allow that"
        )
    try:
        search, about = load_search(a.source, a.by)
        server = make_server(search, about, a.port, a.host)
    except (ImportError, OSError, ValueError) as e:
        parser.error(str(e))
    host, port = server.server_address[:2]
    print(f"serving {about} at http://{host}:{port} (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("ended")
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
