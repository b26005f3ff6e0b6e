"""The trainer's side of the verifier service: what it asks again, where, and what it makes of silence."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from gppo_verifiers.client import Patience, ServiceJudge
from gppo_verifiers.errors import ServiceError
from gppo_verifiers.types import Answer, Status, Task, Verdict

GRADED = {"right": 1.0, "wrong": 0.0}
Handler = Callable[[httpx.Request], httpx.Response]


class Service:
    """One node, which does as its methods say. judged: the texts that it took."""

    def __init__(self) -> None:
        self.judged: list[str] = []
        self.texts: dict[str, str] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text="")
        body = json.loads(request.content)
        return self.take(body["jobs"]) if request.url.path == "/v1/jobs" else self.tell(body["keys"])

    def take(self, jobs: list[Mapping[str, Any]]) -> httpx.Response:
        self.texts |= {job["key"]: job["text"] for job in jobs}
        self.judged += [job["text"] for job in jobs]
        return httpx.Response(202, json={"keys": [job["key"] for job in jobs]})

    def tell(self, keys: list[str]) -> httpx.Response:
        known = [key for key in keys if key in self.texts]
        verdicts = {key: self.verdict(self.texts[key]) for key in known}
        return httpx.Response(
            200, json={"verdicts": verdicts, "pending": [], "unknown": [key for key in keys if key not in known]}
        )

    def verdict(self, text: str) -> dict[str, Any]:
        if text in GRADED:
            return {"score": GRADED[text], "status": "graded", "detail": ""}
        return {"score": 0.0 if text == "unparsable" else None, "status": text, "detail": "a fault"}


class Infra(Service):
    def verdict(self, text: str) -> dict[str, Any]:
        return {"score": None, "status": "infra", "detail": "always"}


class Dropping(Service):
    """Takes answers, and loses the connection where it is asked for verdicts."""

    def tell(self, keys: list[str]) -> httpx.Response:
        raise httpx.ReadError("connection reset")


class Forgetful(Service):
    """Restarts after it took the first answers."""

    def tell(self, keys: list[str]) -> httpx.Response:
        if len(self.judged) == len(set(self.judged)):
            self.texts = {}
        return super().tell(keys)


class Full(Service):
    """Has room at the second attempt."""

    turned_away = False

    def take(self, jobs: list[Mapping[str, Any]]) -> httpx.Response:
        if self.turned_away:
            return super().take(jobs)
        self.turned_away = True
        return httpx.Response(429, headers={"Retry-After": "1"}, json={"error": "full"})


class Replying(Service):
    """Says one thing to whoever asks for verdicts."""

    def __init__(self, reply: Callable[[list[str]], httpx.Response]) -> None:
        super().__init__()
        self.tell = reply  # type: ignore[method-assign]


class Stalled(Service):
    def tell(self, keys: list[str]) -> httpx.Response:
        return httpx.Response(200, json={"verdicts": {}, "pending": keys, "unknown": []})


class Small(Service):
    """Takes one answer at a time."""

    def take(self, jobs: list[Mapping[str, Any]]) -> httpx.Response:
        return super().take(jobs[:1])


class Picky(Service):
    """Takes no batch with a `crash` in it."""

    def take(self, jobs: list[Mapping[str, Any]]) -> httpx.Response:
        if any(job["text"] == "crash" for job in jobs):
            return httpx.Response(400, json={"error": "no such job"})
        return super().take(jobs)


def dead(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def judge_with(*nodes: Handler, patience: Patience | None = None) -> ServiceJudge:
    """nodes: the services, in the order in which they are asked."""
    by_host = {f"node{number}": node for number, node in enumerate(nodes)}
    transport = httpx.MockTransport(lambda request: by_host[request.url.host](request))
    return ServiceJudge(
        [f"http://{host}:8100" for host in by_host], "secret", patience or Patience(1.0, 5.0), transport
    )


def judged(judge: ServiceJudge, *texts: str) -> list[Verdict]:
    return judge.judge([Answer(Task("code", {"tests": []}), text) for text in texts])


def scores(judge: ServiceJudge, *texts: str) -> list[float | None]:
    return [verdict.score for verdict in judged(judge, *texts)]


def test_verdicts_come_in_order_and_no_verdict_is_asked_for_twice() -> None:
    nodes = Service(), Service()
    texts = ["right", "wrong", "unparsable", "crash", "timeout"] * 20
    judge = judge_with(*nodes)
    assert scores(judge, *texts) == [1.0, 0.0, 0.0, None, None] * 20
    assert sorted(nodes[0].judged + nodes[1].judged) == sorted(texts)
    assert nodes[0].judged
    assert nodes[1].judged
    assert judged(judge) == []


@pytest.mark.parametrize("first", [dead, Dropping(), Infra(), Stalled()], ids=["dead", "dropping", "infra", "stalled"])
def test_another_node_judges_where_one_fails(first: Handler) -> None:
    second = Service()
    assert scores(judge_with(first, second, patience=Patience(1.0, 0.4)), "right", "wrong") == [1.0, 0.0]
    assert second.judged == ["right", "wrong"]


@pytest.mark.parametrize("node", [Full(), Forgetful(), Small()], ids=["full", "forgetful", "small"])
def test_one_node_is_asked_again(node: Service) -> None:
    assert scores(judge_with(node), "right", "wrong") == [1.0, 0.0]


def test_what_a_judge_fails_at_again_and_again_has_no_score() -> None:
    nodes = Infra(), Infra()
    assert judged(judge_with(*nodes), "right") == [Verdict(None, Status.INFRA, "always")]
    assert len(nodes[0].judged + nodes[1].judged) == 3


@pytest.mark.parametrize(
    "verdict",
    [
        {},
        {"score": 1.0, "status": "infra", "detail": ""},
        {"score": None, "status": "graded", "detail": ""},
        {"score": float("nan"), "status": "graded", "detail": ""},
        {"score": 2.0, "status": "graded", "detail": ""},
        {"score": 1.0, "status": "splendid", "detail": ""},
        {"score": "1", "status": "graded", "detail": ""},
    ],
)
def test_what_is_no_verdict_is_no_score(verdict: dict[str, Any]) -> None:
    def reply(keys: list[str]) -> httpx.Response:
        body = json.dumps({"verdicts": {keys[0]: verdict}, "pending": [], "unknown": []})
        return httpx.Response(200, content=body, headers={"content-type": "application/json"})

    [found] = judged(judge_with(Replying(reply), patience=Patience(1.0, 0.2)), "right")
    assert (found.score, found.status) == (None, Status.INFRA)


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(500, text="Traceback"),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"verdicts": {"other": GRADED}, "pending": [], "unknown": []}),
    ],
    ids=["error", "page", "list", "other keys"],
)
def test_a_node_that_talks_nonsense_gives_no_score(reply: httpx.Response) -> None:
    node = Replying(lambda keys: httpx.Response(reply.status_code, content=reply.content, headers=reply.headers))
    [found] = judged(judge_with(node, patience=Patience(1.0, 0.2)), "right")
    assert (found.score, found.status) == (None, Status.INFRA)


def test_where_no_node_is_left_every_node_says_why() -> None:
    [found] = judged(judge_with(dead, dead, patience=Patience(1.0, 0.2)), "right")
    assert found.status is Status.INFRA
    assert found.detail.count("connection refused") == 2


def test_an_answer_that_cannot_be_sent_spoils_no_other() -> None:
    assert scores(judge_with(Picky()), "right", "crash", "wrong") == [1.0, None, 0.0]
    tasks = [{"tests": []}, {"tests": object()}]
    verdicts = judge_with(Service()).judge([Answer(Task("code", task), "right\ud800"[:5]) for task in tasks])
    assert [(verdict.score, verdict.status) for verdict in verdicts] == [(1.0, Status.GRADED), (None, Status.CRASH)]


def test_a_run_starts_where_a_node_answers_to_its_token() -> None:
    judge_with(dead, Service()).check()
    with pytest.raises(ServiceError, match="node0.*connection refused; .*node1.*HTTP 401: no"):
        judge_with(dead, lambda request: httpx.Response(401, text="no")).check()


def test_the_token_goes_along() -> None:
    def node(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        return httpx.Response(200)

    judge_with(node).check()
