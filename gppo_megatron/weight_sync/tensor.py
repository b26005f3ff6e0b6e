"""Weights in the body of HTTP requests: for servers that share no folder and no network fabric with the trainer."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from gppo_megatron.weight_sync.buckets import Bucket, buckets
from gppo_megatron.weight_sync.servers import Faults, NamedTensors, Waits, WeightServer, on_all


@dataclass(frozen=True)
class InBody:
    """A Transport: pickled by value, which servers unpickle from an allow-list. bucket_bytes: of a request, about."""

    waits: Waits
    bucket_bytes: int = 2**28

    def send(self, servers: Sequence[WeightServer], name: str, tensors: NamedTensors) -> Faults:
        """See `Transport.send`."""
        faults: dict[str, str] = self.waits.run(on_all(servers, lambda server: server.begin_update()))
        for bucket in buckets(tensors, self.bucket_bytes):
            faults |= self._post(_without(servers, faults), bucket, name)
        faults |= self.waits.run(on_all(_without(servers, faults), lambda server: server.end_update()))
        return faults

    def close(self, servers: Sequence[WeightServer]) -> None:
        """Nothing is held."""

    def _post(self, servers: Sequence[WeightServer], bucket: Bucket, name: str) -> dict[str, str]:
        pickled = pickle.dumps([(each, tensor.detach().cpu().clone()) for each, tensor in bucket])
        faults: dict[str, str] = self.waits.run(on_all(servers, lambda server: server.load_tensors(pickled, name)))
        return faults


def _without(servers: Sequence[WeightServer], faults: Faults) -> list[WeightServer]:
    return [server for server in servers if server.url not in faults]
