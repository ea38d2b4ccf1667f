"""A hub on the loopback address: it serves a checkpoint directory as huggingface.co does, counts, and fails as told.

Two servers, so that going on from the hub to its CDN is going on to another host:

    hub    HEAD and GET /<model>/resolve/<revision>/<file>: small files, and for weights a redirect to the CDN;
           GET /api/models/<model>/revision/<revision>
    cdn    GET /<file>, whole or one range
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MODEL, COMMIT = "some/tiny-model", "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    """One request, as it came; `sent` counts the bytes of body that were given for it."""

    server: str
    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0


@dataclass
class Fault:
    """What a matching request gets in place of its answer, or what changes in it. Each fault is used once, in order."""

    server: str = "cdn"
    method: str = "GET"
    file: str = ""
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None  # in place of the right one
    cut: int | None = None  # the connection ends after so many bytes of body
    stall: bool = False  # no answer before the hub is closed

    def fits(self, request: Request) -> bool:
        return (self.server, self.method) == (request.server, request.method) and request.path.endswith(self.file)


class LoopbackHub:
    """Serves `directory` as `model`, at `COMMIT` and at the branch main. A context manager.

    `requests` are all that came, but for the client's own question about harnesses; `faults` are used up.
    `ranges`: whether the CDN heeds Range. `gone` are answered as the hub answers where a model is missing.
    """

    def __init__(self, directory: Path, ranges: bool = True, model: str = MODEL) -> None:
        self.directory, self.ranges, self.model = directory, ranges, model
        self.revisions = {"main", COMMIT, COMMIT[:7], "refs/pr/1"}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.closed = threading.Event()
        self.servers = {name: self.serve(name) for name in ("hub", "cdn")}
        self.endpoint = f"http://127.0.0.1:{self.servers['hub'].server_port}"
        self.cdn = f"http://localhost:{self.servers['cdn'].server_port}"  # another name: another host to a client

    def serve(self, name: str) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (Answer,), {"hub": self, "name": name}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    def __enter__(self) -> "LoopbackHub":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        for server in self.servers.values():
            server.shutdown()
            server.server_close()

    def sent(self, file: str = ".safetensors") -> int:
        """Bytes of body that were given for files whose names end so."""
        return sum(request.sent for request in self.requests if request.path.endswith(file))

    def asked(self, server: str) -> list[str]:
        """What this server was asked: method, file and range."""
        return [
            f"{request.method} {request.path.rsplit('/', 1)[1]} {request.headers.get('range', '')}".strip()
            for request in self.requests
            if request.server == server
        ]


class Answer(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: LoopbackHub
    name: str

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = Request(self.name, self.command, path, {key.lower(): value for key, value in self.headers.items()})
        if path == "/api/agent-harnesses":
            return self.reply(request, 404, {}, b"")
        self.hub.requests.append(request)
        status, headers, body = self.file(request, path) if self.name == "cdn" else self.resolve(path)
        fault = next((fault for fault in self.hub.faults if fault.fits(request)), None)
        if fault is None:
            return self.reply(request, status, headers, body)
        self.hub.faults.remove(fault)
        if fault.stall:
            self.hub.closed.wait()
            self.close_connection = True
            return None
        if fault.status is not None and fault.status >= 300:
            status, headers, body = fault.status, {}, b"not this time"
        status = fault.status or status
        body = body if fault.body is None else fault.body
        return self.reply(request, status, headers | dict(fault.headers), body, fault.cut)

    def reply(
        self, request: Request, status: int, headers: Mapping[str, str], body: bytes, cut: int | None = None
    ) -> None:
        request.status = status
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = len(body) if cut is None else cut
        try:
            for start in range(0, stop, 2**16):
                chunk = body[start : min(start + 2**16, stop)]
                self.wfile.write(chunk)
                request.sent += len(chunk)
        except OSError:  # the client has gone
            self.close_connection = True
        if cut is not None:
            self.close_connection = True

    def resolve(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """The hub's answer: a small file, or where on the CDN a large one is."""
        match = re.fullmatch(r"/(?:api/models/(.+)/revision/(.+)()|(.+)/resolve/(.+)/([^/]+))", path)
        model, revision, file = [part for part in match.groups() if part is not None] if match else ["", "", ""]
        if model != self.hub.model:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        if revision not in self.hub.revisions:
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"}, b""
        if not file:
            return 200, {"Content-Type": "application/json"}, json.dumps({"id": model, "sha": COMMIT}).encode()
        headers = {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if not (self.hub.directory / file).is_file():
            return 404, headers | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, b""
        content = (self.hub.directory / file).read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        if not file.endswith(".safetensors"):
            return 200, headers | {"ETag": tag}, content
        linked = {"X-Linked-Etag": tag, "X-Linked-Size": str(len(content)), "ETag": '"of-the-pointer"'}
        return 302, headers | linked | {"Location": f"{self.hub.cdn}/{file}?signature=secret"}, b"Found"

    def file(self, request: Request, path: str) -> tuple[int, dict[str, str], bytes]:
        """The CDN's answer: the file, or a range of it."""
        content = (self.hub.directory / path[1:]).read_bytes()
        size, headers = len(content), {"Accept-Ranges": "bytes", "ETag": '"x"'}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if not self.hub.ranges or match is None:
            return 200, headers, content
        if "gzip" in request.headers.get("accept-encoding", ""):  # as some do, and nobody can read such a range
            headers["Content-Encoding"] = "gzip"
        start, stop = int(match[1]), min(int(match[2]) + 1, size)
        if start >= size:
            return 416, headers | {"Content-Range": f"bytes */{size}"}, b""
        return 206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}, content[start:stop]

    def log_message(self, *_: Any) -> None:
        pass
