"""A model hub on 127.0.0.1, as far as huggingface_hub asks one: a revision, its files, and their bytes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_right_person"
_PATH = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<kind>revision|tree)/(?P<revision>[^/]+)"
    r"|/(?P<repo2>[^/]+/[^/]+)/resolve/(?P<revision2>[^/]+)/(?P<file>.+)"
)


@dataclass
class Repo:
    """What one repository holds.

    gated: its files need TOKEN; private: so does knowing of it. is_a_page: what answers for it is a proxy's page.
    """

    files: dict[str, bytes]
    commit: str = "a" * 40
    gated: bool = False
    private: bool = False
    is_a_page: bool = False


@dataclass
class Hub:
    """The running server: its address, its repositories by name, and what was asked of it."""

    address: str
    repos: dict[str, Repo] = field(default_factory=dict)
    files_sent: list[str] = field(default_factory=list)
    asked: int = 0


@contextmanager
def fake_hub() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.asked += 1
        matched = _PATH.fullmatch(unquote(urlsplit(self.path).path))
        repo = hub.repos.get((matched["repo"] or matched["repo2"]) if matched else "")
        knows = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if matched is None or repo is None or (repo.private and not knows):
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"}, body)
        elif (matched["revision"] or matched["revision2"]) not in ("main", "v1", repo.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        elif matched["kind"] == "revision" and repo.is_a_page:
            self._send(200, b"<html>Sign in</html>", {"Content-Type": "text/html"}, body)
        elif matched["kind"] == "revision":
            self._json({"id": matched["repo"], "sha": repo.commit, "siblings": []}, body)
        elif matched["kind"] == "tree":
            self._json([_entry(name, data) for name, data in repo.files.items()], body)
        elif matched["file"] not in repo.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        elif repo.gated and not knows:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        else:
            data = repo.files[matched["file"]]
            if body:
                hub.files_sent.append(matched["file"])
            headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{_blob(data)}"'}
            self._send(200, data, headers, body)

    def _json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, code: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


def _blob(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "oid": _blob(data), "size": len(data), "path": name}
