"""A stand-in for the server of Weights & Biases, for scripts.dashboard and online runs; it keeps what they send."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789" * 4


class StandIn:
    """The server.

    Attributes:
        projects: names of the projects of the entity `me`.
        views: the saved workspaces and reports, each as GraphQL variables.
        streams: what runs sent of their metrics and system metrics.
        address: its URL.
    """

    def __init__(self, projects: list[str]) -> None:
        self.projects = projects
        self.views: list[dict[str, Any]] = []
        self.streams: list[str] = []
        self.address = ""

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which wandb uses this server."""
        return {"WANDB_BASE_URL": self.address, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the answer to a GraphQL query."""
        if "upsertView" in query:
            self.views.append(variables)
            view = {"id": f"view{len(self.views)}", "name": variables["name"], "displayName": variables["displayName"]}
            project = {"id": "1", "name": variables["projectName"], "entityName": variables["entityName"]}
            details = {"type": variables["type"], "description": "", "project": project, "spec": variables["spec"]}
            return {"upsertView": {"view": view | details, "inserted": True}}
        if "viewer" in query:
            return {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if "upsertBucket" in query:
            project = {"id": "1", "name": "cifar", "entity": {"id": "1", "name": "me"}}
            bucket = {"id": "1", "name": variables["name"], "displayName": "", "config": "{}", "historyLineCount": 0}
            return {"upsertBucket": {"bucket": bucket | {"sweepName": None, "project": project}, "inserted": True}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}}
        if "RunResumeStatus" in query:
            return {}
        return {"models": {"edges": [self._edge(name) for name in self.projects], "pageInfo": _LAST_PAGE}}

    def _edge(self, name: str) -> dict[str, Any]:
        node = {"id": name, "name": name, "entityName": "me", "createdAt": "2026-01-01T00:00:00", "isBenchmark": False}
        return {"node": node | {"user": None, "internalId": "1"}, "cursor": name}


_LAST_PAGE = {"endCursor": None, "hasNextPage": False}


@contextmanager
def stand_in(*projects: str) -> Iterator[StandIn]:
    """Serve the projects of one entity on a free port."""
    state = StandIn(list(projects))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/graphql":
                request = json.loads(body)
                answer = {"data": state.answer(request["query"], request.get("variables") or {})}
            else:  # metrics of a run, or wandb's telemetry
                answer = {}
                if self.path.endswith("/file_stream"):
                    state.streams.append(body.decode())
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
