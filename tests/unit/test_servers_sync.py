"""Publishing to servers that fail: what is retried, what ends the run, and that every process walks all weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gppo_megatron.errors import SyncError
from gppo_megatron.fused_checksums import fused_checksums
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.weight_sync.buckets import buckets
from gppo_megatron.weight_sync.servers import Faults, NamedTensors, ToServers, WeightServer

WEIGHTS = {"model.norm.weight": torch.ones(3), "lm_head.weight": torch.arange(8.0).reshape(4, 2)}


class FailureError(Exception):
    pass


@dataclass
class Holder:
    """A server that keeps what a transport puts into it."""

    url: str
    name: str = "default"
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    dead: bool = False
    calls: list[str] = field(default_factory=list)
    failure: type[Exception] = FailureError

    async def weights_name(self) -> str:
        if self.dead:
            raise FailureError(f"{self.url}: gone")
        return self.name

    async def checksums(self) -> Mapping[str, str]:
        return fused_checksums(self.held.items())

    async def pause(self) -> None:
        self.calls.append("pause")

    async def go_on(self) -> None:
        self.calls.append("go_on")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is the transport's business")


@dataclass
class Carrier:
    """A transport. outcomes: what each send reports, after all weights have arrived; `{}` from then on."""

    outcomes: list[Faults] = field(default_factory=list)
    sent_to: list[list[str]] = field(default_factory=list)
    damage: str = ""

    def send(self, servers: Sequence[Any], name: str, tensors: NamedTensors) -> Faults:
        arrived = dict(tensors)
        if self.damage:
            arrived[self.damage] = arrived[self.damage] + 1
        for server in servers:
            server.name, server.held = name, arrived
        self.sent_to.append([server.url for server in servers])
        return self.outcomes.pop(0) if self.outcomes else {}

    def close(self, servers: Sequence[WeightServer]) -> None: ...


@dataclass
class Follower:
    """The team as its second member sees it."""

    said: Any
    rank: int = 1
    size: int = 2

    def gather(self, value: Any) -> list[Any]:
        return [self.said, value]


@dataclass
class Leader:
    rank: int = 0
    size: int = 2

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    with EventLoop() as loop:
        yield loop


@dataclass
class Published:
    admitted: list[tuple[int, Faults]] = field(default_factory=list)
    walked: int = 0

    def weights(self) -> NamedTensors:
        yield from WEIGHTS.items()
        self.walked += 1

    def admit(self, version: int, faults: Faults) -> None:
        self.admitted.append((version, faults))


def publish(loop: EventLoop, servers: Sequence[Any], carrier: Carrier, world: Any = None) -> Published:
    result = Published()
    ToServers(servers, carrier, loop, world or Leader(), "run", result.admit).publish(4, result.weights)
    return result


def test_servers_that_hold_what_was_sent_are_admitted(loop: EventLoop) -> None:
    servers = [Holder("a"), Holder("b")]
    result = publish(loop, servers, Carrier())
    assert (result.admitted, result.walked) == ([(4, {})], 1)
    assert [server.name for server in servers] == ["run.4", "run.4"]
    assert servers[0].calls == ["pause", "go_on"]


def test_one_lost_server_is_left_out(loop: EventLoop) -> None:
    result = publish(loop, [Holder("a"), Holder("b")], Carrier([{"b": "reset"}]))
    assert (result.admitted, result.walked) == ([(4, {"b": "reset"})], 1)


def test_those_that_still_answer_get_another_walk_when_all_failed_together(loop: EventLoop) -> None:
    carrier = Carrier([{"a": "the broadcast broke off", "b": "the broadcast broke off"}])
    result = publish(loop, [Holder("a"), Holder("b", dead=True)], carrier)
    assert carrier.sent_to == [["a", "b"], ["a"]]
    assert (result.admitted, result.walked) == ([(4, {"b": "the broadcast broke off"})], 2)


def test_a_second_failure_of_all_is_reported_and_not_hidden(loop: EventLoop) -> None:
    result = publish(loop, [Holder("a")], Carrier([{"a": "one"}, {"a": "two"}]))
    assert (result.admitted, result.walked) == ([(4, {"a": "two"})], 2)


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_a_tensor_that_is_not_what_was_sent_ends_the_run_by_its_name(loop: EventLoop, name: str) -> None:
    with pytest.raises(SyncError, match=rf"b does not hold {name} as it was sent with the weights run\.4"):
        publish(loop, [Holder("b")], Carrier(damage=name))


def test_no_server_serves_after_one_was_found_wrong(loop: EventLoop) -> None:
    result = Published()
    servers = [Holder("a"), Holder("b")]
    sync = ToServers(servers, Carrier(damage="lm_head.weight"), loop, Leader(), "run", result.admit)
    with pytest.raises(SyncError):
        sync.publish(4, result.weights)
    ((version, faults),) = result.admitted
    assert (version, set(faults)) == (4, {"a", "b"})


def test_a_server_with_another_name_for_its_weights_ends_the_run(loop: EventLoop) -> None:
    class Forgetful(Carrier):
        def send(self, servers: Sequence[Any], name: str, tensors: NamedTensors) -> Faults:
            return super().send(servers, "run.3", tensors)

    with pytest.raises(SyncError, match=r"a calls its weights 'run\.3' after 'run\.4' was sent"):
        publish(loop, [Holder("a")], Forgetful())


def test_a_process_without_servers_walks_all_weights_and_hears_the_outcome(loop: EventLoop) -> None:
    sync = ToServers([], Carrier(), loop, Leader(), "run", lambda version, faults: None)
    outcomes: list[Any] = []
    sync_world = Leader()
    sync_world.gather = lambda value: outcomes.append(value) or [value]  # type: ignore[method-assign,func-returns-value]
    first = ToServers([Holder("a")], Carrier(damage="lm_head.weight"), loop, sync_world, "run", sync.admit)
    with pytest.raises(SyncError):
        first.publish(4, lambda: iter(WEIGHTS.items()))
    result = Published()
    follower = ToServers([], Carrier(), loop, Follower(outcomes[0]), "run", result.admit)
    with pytest.raises(SyncError, match=r"lm_head\.weight"):
        follower.publish(4, result.weights)
    assert result.walked == 1


def test_only_this_runs_names_have_a_version() -> None:
    sync = ToServers([], Carrier(), None, Leader(), "a.b", lambda version, faults: None)  # type: ignore[arg-type]
    assert [sync.version_of(name) for name in ("a.b.12", "a.b.-1", "b.12", "default", "a.b.x")] == [
        12,
        None,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize("most", [1, 12, 13, 36, 10_000])
def test_no_tensor_is_dropped_at_a_buckets_edge(most: int) -> None:
    tensors = [(str(size), torch.zeros(size)) for size in (3, 0, 9, 1, 1, 3)]
    packed = list(buckets(iter(tensors), most))
    assert [pair for bucket in packed for pair in bucket] == tensors
    assert all(len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= most for bucket in packed)
