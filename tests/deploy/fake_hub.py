"""A hub of models on loopback, as far as huggingface_hub asks one."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL, GATED = "org/model", "org/gated"
BAD_TOKEN = "Invalid credentials in Authorization header"


@dataclass(slots=True)
class FakeHub:
    """Serves one folder as `org/model`, shows `org/gated` without its files, and answers 503 for `org/broken`."""

    folder: Path
    address: str = ""
    requests: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.requests.append(path)
        path = path.partition("?")[0]
        model_id = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        if model_id == "org/broken":
            return 503, {}, b""
        if model_id == "org/token":
            return 401, {"X-Error-Message": BAD_TOKEN}, b""
        if model_id not in (MODEL, GATED):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        _, _, rest = path.partition(f"{model_id}/")
        kind, revision, *names = rest.split("/")
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if kind == "revision":
            return 200, {}, json.dumps({"id": model_id, "sha": COMMIT}).encode()
        if kind == "tree":
            return 200, {}, self._tree()
        if model_id == GATED:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        content = (self.folder / names[0]).read_bytes()
        return 200, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}, content

    def _tree(self) -> bytes:
        files = [(path.name, path.read_bytes()) for path in sorted(self.folder.iterdir())]
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": _digest(content)} for name, content in files
        ]
        return json.dumps(entries).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve_hub(folder: Path) -> Iterator[FakeHub]:
    """A hub for as long as the block runs."""
    hub = FakeHub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(has_body=True)

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def _answer(self, *, has_body: bool) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_request(self, *arguments: object) -> None:
            """Nothing: the output is the tests'."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
