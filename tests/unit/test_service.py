"""The verifier service: its queue, its canaries and its routes, with judges made for the test."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
from gppo_verifiers.errors import ServiceError
from gppo_verifiers.service.app import service
from gppo_verifiers.service.arguments import Options
from gppo_verifiers.service.canaries import CANARIES, faults, watch
from gppo_verifiers.service.command import serve
from gppo_verifiers.service.desk import Desk, FullError, RefusedError
from gppo_verifiers.types import Answer, Status, Task, Verdict
from gppo_verifiers.wire import Job, job_to_json
from starlette.testclient import TestClient

CODE = frozenset({"code"})
SCORES = {
    "right": Verdict(1.0, Status.GRADED, "AC"),
    "wrong": Verdict(0.0, Status.GRADED, "WA"),
    "infra": Verdict(None, Status.INFRA, "a fault"),
}
KNOWN = {canary.program: Verdict(canary.score, Status.GRADED, canary.detail) for canary in CANARIES}


class Scripted:
    """Judges an answer by its text. held: where it is set, an answer waits until `go` is."""

    def __init__(self, held: bool = False) -> None:
        self.go = threading.Event()
        self.judged: list[str] = []
        self.lies = False
        if not held:
            self.go.set()

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [self._judge_one(answer.text) for answer in answers]

    def close(self) -> None:
        pass

    def _judge_one(self, text: str) -> Verdict:
        if text in KNOWN:
            return Verdict(1.0, Status.GRADED, "AC") if self.lies else KNOWN[text]
        self.judged.append(text)
        assert self.go.wait(30)
        return SCORES[text]


def job(key: str, text: str = "right") -> Job:
    return Job(key, Answer(Task("code", {"tests": []}), text))


def at_desk(test: Callable[[Desk, Scripted], object], held: bool = False, **options: int) -> None:
    """Run a coroutine function with a desk at work."""

    async def run() -> None:
        judge = Scripted(held)
        desk = Desk(judge, **{"workers": 1, "capacity": 4, "kept": 100} | options)
        work = asyncio.create_task(desk.run())
        try:
            await test(desk, judge)  # type: ignore[misc]
        finally:
            judge.go.set()
            work.cancel()

    asyncio.run(run())


async def scores(desk: Desk, *keys: str) -> list[float | None]:
    results = await desk.results(keys, 30)
    assert results.pending == results.unknown == []
    return [results.verdicts[key].score for key in keys]


def test_a_key_is_judged_once_and_again_where_the_judge_failed() -> None:
    async def test(desk: Desk, judge: Scripted) -> None:
        for _ in range(2):
            desk.submit([job("a"), job("b", "wrong"), job("c", "infra"), job("a")])
            assert await scores(desk, "a", "b", "c") == [1.0, 0.0, None]
        assert judge.judged == ["right", "wrong", "infra", "infra"]
        with pytest.raises(ValueError, match="the key 'a' was that of another job"):
            desk.submit([job("d"), job("a", "wrong")])
        assert (await desk.results(["d", "a"], 0)).unknown == ["d"]

    at_desk(test)


def test_a_full_queue_takes_what_it_has_room_for_and_says_when_to_come_again() -> None:
    async def test(desk: Desk, judge: Scripted) -> None:
        desk.submit([job("0")])
        while not judge.judged:
            await asyncio.sleep(0.01)
        assert desk.submit([job("1"), job("2")]) == ["1", "2"]
        assert desk.submit([job("2"), job("3"), job("4")]) == ["2", "3"]
        with pytest.raises(FullError, match="3 jobs wait, and 3 may") as caught:
            desk.submit([job("4")])
        assert 1 <= caught.value.retry_seconds <= 30
        results = await desk.results([str(number) for number in range(5)], 0.05)
        assert (results.pending, results.unknown) == (["0", "1", "2", "3"], ["4"])
        judge.go.set()
        assert await scores(desk, "0", "1", "2", "3") == [1.0] * 4

    at_desk(test, held=True, capacity=3)


def test_old_verdicts_are_forgotten() -> None:
    async def test(desk: Desk, judge: Scripted) -> None:
        for key in "abc":
            desk.submit([job(key)])
            await scores(desk, key)
        assert (await desk.results("abc", 0)).unknown == ["a"]

    at_desk(test, kept=2)


def test_a_node_that_is_taken_out_gives_no_score_and_takes_no_job() -> None:
    async def test(desk: Desk, judge: Scripted) -> None:
        judge.go.set()
        desk.submit([job("proven")])
        await scores(desk, "proven")
        desk.put_back()
        desk.submit([job("unproven")])
        await scores(desk, "unproven")
        judge.go.clear()
        desk.submit([job("running"), job("waiting")])
        while len(judge.judged) < 3:
            await asyncio.sleep(0.01)
        desk.take_out("it lies")
        judge.go.set()
        assert await scores(desk, "proven", "unproven", "waiting", "running") == [1.0, None, None, None]
        with pytest.raises(RefusedError, match="it lies"):
            desk.submit([job("new")])
        desk.put_back()
        desk.submit([job("new"), job("unproven")])
        assert await scores(desk, "new", "unproven") == [1.0, 1.0]
        judge.go.clear()
        desk.submit([job("running")])
        while len(judge.judged) < 6:
            await asyncio.sleep(0.01)
        desk.take_out("it lies again")
        judge.go.set()
        assert await scores(desk, "running") == [None]

    at_desk(test, held=True)


def test_canaries_take_a_lying_node_out_and_bring_it_back() -> None:
    async def test(desk: Desk, judge: Scripted) -> None:
        watching = asyncio.create_task(watch(desk, judge, 0.02))
        judge.lies = True
        while not desk.refusal:
            await asyncio.sleep(0.01)
        assert "a wrong program was judged graded 1.0" in desk.refusal
        assert "a right program" not in desk.refusal
        judge.lies = False
        while desk.refusal:
            await asyncio.sleep(0.01)
        watching.cancel()
        assert faults(judge) == []

    at_desk(test)


def test_a_draining_desk_finishes_what_it_has() -> None:
    async def test(desk: Desk, judge: Scripted) -> None:
        desk.submit([job("a"), job("b")])
        draining = asyncio.create_task(desk.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="shutting down"):
            desk.submit([job("c")])
        judge.go.set()
        assert await scores(desk, "a", "b") == [1.0, 1.0]
        await draining

    at_desk(test, held=True)


def test_the_routes() -> None:
    judge = Scripted()
    desk = Desk(judge, 1, 4, 100)
    with TestClient(service(desk, judge, CODE, 60.0, "secret")) as client:
        assert client.get("/health").json() == {"serving": True, "reason": ""}
        jobs = {"jobs": [job_to_json(job("a")), job_to_json(job("b", "wrong"))]}
        for path in ("/v1/jobs", "/v1/results"):
            assert client.post(path, json=jobs).status_code == 401
        assert client.get("/metrics", headers={"Authorization": "Bearer other"}).status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        assert client.post("/v1/jobs", json=jobs).status_code == 202
        reply = client.post("/v1/results", json={"keys": ["a", "b", "c"], "wait": 30}).json()
        assert reply == {
            "verdicts": {
                "a": {"score": 1.0, "status": "graded", "detail": "AC"},
                "b": {"score": 0.0, "status": "graded", "detail": "WA"},
            },
            "pending": [],
            "unknown": ["c"],
        }
        metrics = client.get("/metrics").text
        assert 'gppo_verifier_jobs_total{status="graded"} 2\n' in metrics
        assert "gppo_verifier_serving 1\n" in metrics
        client.portal.call(desk.take_out, "it is sick")
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/jobs", json=jobs)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/jobs", "x", "Expecting value"),
        ("/v1/jobs", "[]", "a request is a JSON object"),
        ("/v1/jobs", '{"jobs": []}', "jobs is a list of 1 to 256"),
        ("/v1/jobs", '{"jobs": [{"key": "a"}]}', "a job has a key, a kind, a payload and a text"),
        ("/v1/jobs", '{"jobs": [{"key": "a", "kind": "math", "payload": {}, "text": ""}]}', "no tasks of kind 'math'"),
        ("/v1/results", '{"keys": [1]}', "keys are text"),
        ("/v1/results", '{"keys": ["a"], "wait": NaN}', "keys are text, and wait is seconds"),
        ("/v1/results", "[" * 100_000, "recursion"),
    ],
)
def test_a_request_that_is_none_says_why(path: str, body: str, message: str) -> None:
    judge = Scripted()
    with TestClient(service(Desk(judge, 1, 4, 100), judge, CODE, 60.0, None)) as client:
        reply = client.post(path, content=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]


def test_other_machines_need_a_token() -> None:
    for host in ("0.0.0.0", "::", "node7", "10.0.0.1"):
        options = Options(host, 0, None, "zygote", ["python"], 1, 1, 1.0, 1.0, 1.0, 64)
        with pytest.raises(ServiceError, match="a token is needed"):
            serve(options)
