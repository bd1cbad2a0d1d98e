"""A server on loopback with the routes of the Hugging Face hub that huggingface_hub calls."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Files = dict[str, bytes]
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^?]+))?(?:\?.*)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)(?:\?.*)?")


def files_in(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Hub:
    """Repositories by kind and name, such as `models/org/tiny`, with their commits and the newest one."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}
        self.heads: dict[str, str] = {}
        self.gated: set[str] = set()
        self.refuses: set[str] = set()
        """files that are answered by 503"""
        self.cut: dict[str, int] = {}
        """files whose connection ends once, after this number of bytes"""
        self.requests: list[tuple[str, str]] = []
        """method and path of each request"""
        hub = self

        class Handler(_Handler):
            @property
            def hub(self) -> Hub:
                return hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repository: str, files: Files) -> str:
        """Make `files` the newest commit of a repository, and return its sha."""
        commits = self.commits.setdefault(repository, {})
        content = repr((repository, len(commits), sorted(files.items()))).encode()
        sha = hashlib.sha1(content).hexdigest()
        commits[sha], self.heads[repository] = files, sha
        return sha

    def downloaded(self) -> list[str]:
        """Return the names of the requested files, in order."""
        found = [_FILE.fullmatch(path) for method, path in self.requests if method == "GET"]
        return [match[4] for match in found if match]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def answer(self, code: int, body: bytes = b"", cut: int | None = None, **headers: str) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True

    def answer_json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def answer_error(self, code: int, name: str) -> None:
        self.answer(code, **{"X-Error-Code": name})

    def do_GET(self) -> None:
        self.hub.requests.append((self.command, self.path))
        if found := _API.fullmatch(self.path):
            self._api(f"{found[1]}/{found[2]}", found[3], found[4] or "main")
        elif found := _FILE.fullmatch(self.path):
            self._file(f"{(found[1] or 'models/').rstrip('/')}/{found[2]}", found[3], found[4])
        else:
            self.answer_error(404, "RepoNotFound")

    do_HEAD = do_GET

    def _files(self, repository: str, revision: str) -> tuple[str, Files] | None:
        if repository not in self.hub.commits:
            return self.answer_error(401, "RepoNotFound")
        sha = self.hub.heads[repository] if revision == "main" else revision
        if sha not in self.hub.commits[repository]:
            return self.answer_error(404, "RevisionNotFound")
        return sha, self.hub.commits[repository][sha]

    def _api(self, repository: str, what: str | None, revision: str) -> None:
        if found := self._files(repository, revision):
            sha, files = found
            if what == "tree":
                names = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
                tree = [{"type": "file", "path": n, "size": len(files[n]), "oid": oid} for n, oid in names.items()]
                self.answer_json(tree)
            else:
                self.answer_json({"id": repository.partition("/")[2], "sha": sha, "siblings": []})

    def _file(self, repository: str, revision: str, name: str) -> None:
        found = self._files(repository, revision)
        if not found:
            return
        sha, files = found
        if repository in self.hub.gated and not self.headers.get("Authorization"):
            self.answer_error(401, "GatedRepo")
        elif name in self.hub.refuses and self.command == "GET":
            self.answer(503)
        elif name not in files:
            self.answer_error(404, "EntryNotFound")
        else:
            content, start = files[name], 0
            if asked := self.headers.get("Range"):
                start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": sha}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            cut = self.hub.cut.pop(name, None) if self.command == "GET" else None
            self.answer(206 if start else 200, content[start:], cut, **headers)
