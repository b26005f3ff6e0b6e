"""A router as a directory of workers: its answers in the newer and the older form, and what is none."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gppo_megatron.build_rollout import located
from gppo_megatron.config.rollouts import SglangRollout
from gppo_megatron.errors import ConfigError, SyncError
from gppo_megatron.rollout.directory import workers_of
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.over_http import OverHttp
from gppo_megatron.types import Alone
from tests.served import served

ROUTER = "http://router:30000"
ANSWERS = json.loads(Path("tests/data/router_workers.json").read_text())
"""`newer`: of /workers, with the keys that release 0.3.2 documents. `older`: of /list_workers."""
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    with EventLoop() as loop:
        yield loop


def knows(**paths: Any) -> Answer:
    """A router that answers these paths, and 404 otherwise."""

    def answer(request: httpx.Request) -> httpx.Response:
        name = request.url.path.removeprefix("/")
        return httpx.Response(200, json=paths[name]) if name in paths else httpx.Response(404, text="")

    return answer


def asked(loop: EventLoop, answer: Answer, seconds: float = 0.0) -> tuple[str, ...]:
    async def ask() -> tuple[str, ...]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await workers_of(OverHttp(ROUTER, client), seconds)

    return loop.run(ask())


def test_both_forms_name_the_workers(loop: EventLoop) -> None:
    assert asked(loop, knows(workers=ANSWERS["newer"])) == ("http://worker-a:8000", "http://worker-b:8000")
    assert asked(loop, knows(list_workers=ANSWERS["older"])) == ("http://worker-a:8000", "http://worker-b:8000")


def test_a_worker_that_is_listed_for_each_of_its_ranks_is_one(loop: EventLoop) -> None:
    urls = [f"http://worker-{name}:8000@{rank}" for name in "ab" for rank in (0, 1)]
    assert asked(loop, knows(list_workers={"urls": urls})) == ("http://worker-a:8000", "http://worker-b:8000")


def changed(**values: Any) -> dict[str, Any]:
    """The newer answer with another second worker."""
    first, second = ANSWERS["newer"]["workers"]
    return {**ANSWERS["newer"], "workers": [first, {**second, **values}]}


def silent(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("All connection attempts failed")


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (knows(workers={"workers": [], "total": 0}), SyncError, "lists no worker, after 0 s; start it and its workers"),
        (knows(list_workers={"urls": []}), SyncError, "lists no worker, after 0 s"),
        (silent, SyncError, "cannot be asked for its workers: .*ConnectError: All connection attempts failed, after 0"),
        (lambda _: httpx.Response(503, text="busy"), SyncError, "cannot be asked for its workers: .*HTTP 503: busy"),
        (knows(), ConfigError, "is no router: it knows neither /workers nor /list_workers; list a server itself in ro"),
        (knows(workers={"models": []}), ConfigError, "lists no workers in its answer"),
        (
            knows(workers=changed(worker_type="prefill")),
            ConfigError,
            "has the prefill worker http://worker-b:8000",
        ),
        (knows(workers=changed(url="grpc://w:1")), ConfigError, "has the regular worker grpc://w:1, but a run speaks"),
    ],
)
def test_what_is_no_directory_is_one_line(loop: EventLoop, answer: Answer, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=f"^rollout.router: {ROUTER} {message}") as error:
        asked(loop, answer)
    assert "\n" not in str(error.value)


def test_it_waits_for_the_first_worker(loop: EventLoop) -> None:
    answers = [httpx.Response(503, text=""), httpx.Response(200, json={"workers": []})]

    def answer(request: httpx.Request) -> httpx.Response:
        return answers.pop(0) if answers else knows(workers=ANSWERS["newer"])(request)

    assert len(asked(loop, answer, seconds=200.0)) == 2


def test_a_server_in_the_place_of_a_router(loop: EventLoop, tmp_path: Path) -> None:
    from gppo_megatron.config.schema import TinyModel
    from gppo_megatron.data.model_folder import create_tiny

    create_tiny(TinyModel(), tmp_path, seed=1)
    with served(tmp_path) as url, pytest.raises(ConfigError, match=f"rollout.router: {url} is no router"):
        located(SglangRollout(max_new_tokens=4, context=8, router=f"{url}/", recovery_seconds=1.0), loop, Alone())
