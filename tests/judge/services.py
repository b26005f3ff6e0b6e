"""Verifier services for tests: processes of `gppo serve-verifiers`, and a network that loses connections."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def serving(*options: str, environment: Mapping[str, str] | None = None, folder: Path | None = None) -> Iterator:
    """(process, URL) of a service that has passed its self-test; it is killed at the end if it still runs."""
    command = [sys.executable, "-m", "gppo_megatron", "serve-verifiers", *options]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | (environment or {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings, cwd=folder) as process:
        try:
            line = process.stdout.readline()
            assert " at http://" in line, line
            yield process, line.split(" at ")[1].strip()
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def losing(url: str, losses: int) -> Iterator[str]:
    """The URL of a way to the service at `url` on which the first so many connections break before the reply comes."""
    host, port = url.removeprefix("http://").split(":")
    left = [losses]

    def carry(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port))) as service:
            breaks = left[0] > 0
            left[0] -= breaks
            back = threading.Thread(target=copy, args=(service, client, breaks))
            back.start()
            copy(client, service, False)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=carry, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def copy(source: socket.socket, target: socket.socket, breaks: bool) -> None:
    """Pass bytes on until the source ends; with `breaks`, cut both where the first come."""
    with suppress(OSError):
        while piece := source.recv(65536):
            if breaks:
                break
            target.sendall(piece)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
