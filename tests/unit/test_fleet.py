"""The fleet over servers that fail in every way a server can; time is not waited for."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from gppo_megatron.errors import GppoError, SyncError
from gppo_megatron.metrics import StepMetrics, Sum
from gppo_megatron.rollout.engine import Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.fleet import Fleet, Patience
from gppo_megatron.rollout.server import GarbledReplyError, RefusedError, Sampled, ServerError, ServerLostError

STOP, VOCAB, CONTEXT = 9, 10, 64
PATIENCE = Patience(attempts=4, requests=2, recovery_seconds=0.0)

Fault = Callable[[Sampled], Sampled]


@dataclass
class Scripted:
    """Continues a prompt by counting up from its last token to STOP. faults: what becomes of the next answers."""

    url: str
    weights: str = "run.0"
    faults: list[Fault | ServerError] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    down: bool = False

    async def generate(self, request: Request, name: str, grown: Callable[[Sampled], None]) -> Sampled:
        if self.down:
            raise ServerLostError(f"{self.url}: ConnectError")
        self.asked.append(request)
        tokens = list(range(request.prompt_ids[-1] + 1, STOP + 1))[: request.sampling.max_new_tokens]
        whole = Sampled(tokens, [-0.1 * token for token in tokens], [self.weights] * len(tokens))
        whole.end = "stop" if tokens[-1] == STOP else "length"
        fault = self.faults.pop(0) if self.faults else lambda sampled: sampled
        if isinstance(fault, ServerError):
            grown(first(2)(whole))
            raise fault
        return fault(whole)

    async def weights_name(self) -> str:
        if self.down:
            raise ServerLostError(f"{self.url}: ConnectError")
        return self.weights

    async def abort(self, name: str) -> None:
        self.aborted.append(name)


def first(count: int) -> Fault:
    """The first tokens alone, as after an abort."""
    return lambda whole: Sampled(whole.token_ids[:count], whole.logprobs[:count], whole.versions[:count], "abort")


def changed(**values: object) -> Fault:
    def change(whole: Sampled) -> Sampled:
        for name, value in values.items():
            setattr(whole, name, value)
        return whole

    return change


def version_of(name: str) -> int | None:
    run, _, version = name.partition(".")
    return int(version) if run == "run" else None


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    with EventLoop() as loop:
        yield loop


def fleet_of(loop: EventLoop, *servers: Scripted) -> Fleet:
    fleet = Fleet(servers, loop, version_of, VOCAB, CONTEXT, PATIENCE)
    fleet.admit(0, {})
    return fleet


def request(*prompt: int, most: int = 20) -> Request:
    return Request(prompt, Sampling(1.0, most, frozenset({STOP})), 0)


def counts(fleet: Fleet) -> dict[str, float]:
    metrics = StepMetrics()
    fleet.take_metrics(metrics)
    return {name: metric.value for name, metric in metrics.items() if isinstance(metric, Sum)}


def answers(fleet: Fleet, requests: Sequence[Request]) -> list[tuple[list[int], str]]:
    return [(completion.token_ids.tolist(), completion.finish) for completion in fleet.generate(requests)]


def test_order_limits_and_ends(loop: EventLoop) -> None:
    fleet = fleet_of(loop, Scripted("a"), Scripted("b"))
    asked = [request(token) for token in (5, 6, 7, 8)] + [request(1, most=3)]
    assert answers(fleet, asked) == [
        ([6, 7, 8, 9], "stop"),
        ([7, 8, 9], "stop"),
        ([8, 9], "stop"),
        ([9], "stop"),
        ([2, 3, 4], "length"),
    ]
    assert counts(fleet) == {"rollout/retries": 0, "rollout/garbled_replies": 0, "rollout/servers_lost": 0}


def test_a_group_stays_with_one_server_and_prompts_spread(loop: EventLoop) -> None:
    servers = [Scripted("a"), Scripted("b")]
    fleet = fleet_of(loop, *servers)
    all_prompts = [(one, two) for one in range(1, 8) for two in range(1, 9)]
    fleet.generate([request(*prompt) for prompt in all_prompts for _ in range(3)])
    prompts = [{asked.prompt_ids for asked in server.asked} for server in servers]
    assert prompts[0] | prompts[1] == set(all_prompts)
    assert not prompts[0] & prompts[1]
    assert all(len(own) > len(all_prompts) // 4 for own in prompts)


@pytest.mark.parametrize("fault", [first(2), ServerLostError("a: ReadTimeout")], ids=["aborted", "lost"])
def test_tokens_sampled_before_a_fault_are_kept(loop: EventLoop, fault: Fault | ServerError) -> None:
    server = Scripted("a", faults=[fault])
    fleet = fleet_of(loop, server)
    (completion,) = fleet.generate([request(4, 5)])
    assert completion.token_ids.tolist() == [6, 7, 8, 9]
    assert completion.logprobs.tolist() == pytest.approx([-0.6, -0.7, -0.8, -0.9])
    assert completion.versions.tolist() == [0] * 4
    assert [asked.prompt_ids for asked in server.asked] == [(4, 5), (4, 5, 6, 7)]
    assert [asked.sampling.max_new_tokens for asked in server.asked] == [20, 18]
    assert counts(fleet)["rollout/retries"] == 1


@pytest.mark.parametrize(
    "fault",
    [
        GarbledReplyError("a: not JSON"),
        changed(versions=["other.0"] * 4),
        changed(versions=["run.1"] * 4),
        changed(token_ids=[6, 7, 8, VOCAB]),
        changed(token_ids=[9, 7, 8, 9]),
        changed(token_ids=[6] * 21, logprobs=[-1.0] * 21, versions=["run.0"] * 21),
    ],
    ids=["garbage", "other run", "future weights", "no token", "beyond a stop", "too long"],
)
def test_nothing_of_an_answer_that_cannot_be_is_used(loop: EventLoop, fault: Fault | ServerError) -> None:
    fleet = fleet_of(loop, Scripted("a", faults=[fault]))
    assert answers(fleet, [request(5)]) == [([6, 7, 8, 9], "stop")]
    assert counts(fleet) == {"rollout/retries": 1, "rollout/garbled_replies": 1, "rollout/servers_lost": 1}


def test_a_dead_server_is_left_out_and_taken_back_with_the_right_weights_alone(loop: EventLoop) -> None:
    good, bad = Scripted("a"), Scripted("b", down=True)
    fleet = fleet_of(loop, good, bad)
    asked = [request(token) for token in range(1, 8)]
    fleet.generate(asked)
    assert len(good.asked) == len(asked)
    bad.down, bad.weights = False, "run.7"
    fleet.generate(asked)
    assert not bad.asked
    bad.weights = "run.0"
    fleet.generate(asked)
    assert bad.asked


def test_without_any_server_each_ones_fault_is_told(loop: EventLoop) -> None:
    fleet = fleet_of(loop, Scripted("http://a", down=True), Scripted("http://b", down=True))
    with pytest.raises(GppoError, match=r"no rollout server is left: http://a: ConnectError; http://b: ConnectError"):
        fleet.generate([request(5)])


def test_a_response_that_is_always_aborted_ends_the_run(loop: EventLoop) -> None:
    fleet = fleet_of(loop, Scripted("a", faults=[first(0)] * 4))
    with pytest.raises(GppoError, match="not complete after 4 attempts, with 0 tokens; at last a aborted it"):
        fleet.generate([request(5)])


def test_a_refusal_ends_the_run_with_the_servers_words_and_aborts_the_rest(loop: EventLoop) -> None:
    server = Scripted("a", faults=[RefusedError("a/generate: HTTP 400: unknown key")])
    with pytest.raises(GppoError, match="HTTP 400: unknown key"):
        fleet_of(loop, server).generate([request(5)] * 3)
    assert len(server.aborted) == 1


@dataclass
class Held(Scripted):
    """Answers after a word of its own, with the weights that it holds then."""

    goes: asyncio.Event = field(default_factory=asyncio.Event)
    holding: threading.Event = field(default_factory=threading.Event)

    async def generate(self, request: Request, name: str, grown: Callable[[Sampled], None]) -> Sampled:
        before = self.weights
        self.holding.set()
        await self.goes.wait()
        sampled = await super().generate(request, name, grown)
        sampled.versions[0] = before
        return sampled


def test_a_response_under_way_may_go_on_under_the_weights_that_are_being_published(loop: EventLoop) -> None:
    server = Held("a")
    fleet = fleet_of(loop, server)
    (future,) = fleet.begin([[request(6)]])
    assert server.holding.wait(10)
    fleet.expect(1)
    server.weights = "run.1"
    loop.run(_set(server.goes))
    (completion,) = future.result(10)
    assert completion.token_ids.tolist() == [7, 8, 9]
    assert completion.versions.tolist() == [0, 1, 1]
    fleet.admit(1, {})
    assert fleet.generate([request(6)])[0].versions.tolist() == [1, 1, 1]
    assert counts(fleet)["rollout/garbled_replies"] == 0


def test_giving_up_one_batch_ends_its_own_requests_alone(loop: EventLoop) -> None:
    server = Held("a")
    fleet = fleet_of(loop, server)
    one, other = fleet.begin([[request(6)], [request(7)]])
    assert server.holding.wait(10)
    one.cancel()
    for _ in range(1000):
        if server.aborted:
            break
        time.sleep(0.01)
    loop.run(_set(server.goes))
    assert other.result(10)[0].token_ids.tolist() == [8, 9]
    assert len(server.aborted) == 1
    assert one.cancelled()


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_an_end_token_that_the_run_does_not_know_is_an_error(loop: EventLoop) -> None:
    end = changed(token_ids=[6], logprobs=[-1.0], versions=["run.0"], end="stop")
    with pytest.raises(GppoError, match="ends a response at token 6"):
        fleet_of(loop, Scripted("a", faults=[end])).generate([request(5)])


@pytest.mark.parametrize(
    ("bad", "message"),
    [(request(), "without tokens"), (request(VOCAB), "vocabulary"), (request(1, most=64), "context is 64")],
)
def test_what_the_model_cannot_take_never_reaches_a_server(loop: EventLoop, bad: Request, message: str) -> None:
    server = Scripted("a")
    with pytest.raises(ValueError, match=message):
        fleet_of(loop, server).generate([request(5), bad])
    assert not server.asked


def test_nobody_serves_without_the_weights(loop: EventLoop) -> None:
    fleet = Fleet([Scripted("a")], loop, version_of, VOCAB, CONTEXT, PATIENCE)
    with pytest.raises(SyncError, match="publish"):
        fleet.generate([request(5)])
    with pytest.raises(SyncError, match="no server holds version 3 of the weights: a: stalled"):
        fleet.admit(3, {"a": "stalled"})
    assert fleet.version == -1
