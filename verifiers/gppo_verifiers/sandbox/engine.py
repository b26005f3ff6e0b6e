"""Docker's Engine API over its local socket: the few calls that the judge needs."""

import json
import os
import socket
from http.client import HTTPConnection, HTTPException
from typing import Any

from gppo_verifiers.sandbox.base import IsolationError

DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
VERSION = "v1.40"
SECONDS = 120.0
"""One call may take so long, and no longer."""
FIX = (
    "start Docker (Debian: apt install docker.io), and where its socket is not /var/run/docker.sock, set DOCKER_HOST "
    "to unix://PATH"
)


class LocalConnection(HTTPConnection):
    """HTTP over a local socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Engine:
    """The engine of this machine, at $DOCKER_HOST. Raises IsolationError where that is not a local socket."""

    def __init__(self) -> None:
        scheme, _, self._path = (os.environ.get("DOCKER_HOST") or DEFAULT_ADDRESS).partition("://")
        if scheme != "unix":
            raise IsolationError(f"DOCKER_HOST is {scheme}://..., and must be unix://PATH: an engine of this machine")

    def call(self, method: str, path: str, body: bytes | dict[str, Any] = b"") -> Any:
        """The answer, None where there is none. body: JSON, or a tar file. Raises IsolationError."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
        connection = LocalConnection(self._path)
        try:
            connection.request(method, f"/{VERSION}{path}", content, {"Content-Type": kind})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            raise IsolationError(f"no Docker engine answers at {self._path} ({error!r}); {FIX}") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise IsolationError(f"Docker refuses {method} {path}: {answer.decode('utf-8', 'replace').strip()}")
        # Some calls answer with a line of JSON for every step; the last one counts.
        return json.loads(answer.splitlines()[-1]) if answer.strip() else None
