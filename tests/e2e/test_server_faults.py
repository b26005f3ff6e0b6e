"""The fault matrix: whatever a server does wrong, a run goes on or ends with one clear line, and trains on nothing
false.

The first half asks the fleet alone, the second whole runs against processes of `gppo serve-embedded --fault`.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file

from gppo_megatron.config.load import load
from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import GppoError, SyncError
from gppo_megatron.metrics import StepMetrics, Sum
from gppo_megatron.rollout.engine import Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.fleet import Fleet, Patience
from gppo_megatron.rollout.sglang import SglangServer
from gppo_megatron.types import Alone
from gppo_megatron.weight_sync.servers import ToServers
from gppo_megatron.weight_sync.tensor import InBody
from tests.contract.test_engine import Weights, recomputed
from tests.e2e.test_servers import SHORT, launch, recipe
from tests.served import CONTEXT, VOCAB, Serving, mendable, served, serving_process

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    create_tiny(TinyModel(), path, seed=1)
    return path


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    weights: Weights = load_file(folder / "model.safetensors")
    return weights


@pytest.fixture(scope="module")
def healthy(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


@dataclass(frozen=True)
class Fleeting:
    """A fleet, and the way its weights take."""

    fleet: Fleet
    sync: ToServers
    folder: Path
    weights: Weights

    def publish(self, version: int) -> None:
        self.sync.publish(version, lambda: iter(self.weights.items()))

    def sample(self) -> dict[str, float]:
        """Every response comes back whole, with log-probs of the weights in use; what was counted on the way."""
        requests = [Request((2 + row, 3), Sampling(1.0, 12, frozenset({1})), row) for row in range(16)]
        for request, completion in zip(requests, self.fleet.generate(requests), strict=True):
            assert len(completion.token_ids) == 12 or completion.token_ids[-1] == 1
            assert set(completion.versions.tolist()) == {self.fleet.version}
            expected = recomputed(self.folder, self.weights, request, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)
        metrics = StepMetrics()
        self.fleet.take_metrics(metrics)
        return {name: metric.value for name, metric in metrics.items() if isinstance(metric, Sum)}


@contextmanager
def fleet_of(folder: Path, weights: Weights, urls: Sequence[str], fault: str) -> Iterator[Fleeting]:
    with EventLoop() as loop:
        client = httpx.AsyncClient(timeout=4.0 if fault.startswith("stall") else 60.0)
        servers = [SglangServer(url, client) for url in urls]
        patience = Patience(attempts=4, recovery_seconds=0.0)
        fleet = Fleet(servers, loop, lambda name: sync.version_of(name), VOCAB, CONTEXT, patience)
        sync = ToServers(servers, InBody(loop), loop, Alone(), "run", fleet.admit)
        try:
            yield Fleeting(fleet, sync, folder, weights)
        finally:
            loop.run(client.aclose())


SAMPLING_FAULTS = {
    "dropped:2": ("servers_lost", "RemoteProtocolError"),
    "500:2": ("servers_lost", "HTTP 500: a fault on purpose"),
    "garbage:2": ("garbled_replies", "is not JSON"),
    "stall:2": ("servers_lost", "ReadTimeout"),
    "wrong-version:2": ("garbled_replies", "weights-of-another-run"),
}
"""A fault that stays -> the count it goes into, and what the line says of it where no other server is left."""


@pytest.mark.parametrize("fault", list(SAMPLING_FAULTS))
def test_the_others_finish_what_one_began(folder: Path, weights: Weights, healthy: str, fault: str) -> None:
    with served(folder, fault) as faulty, fleet_of(folder, weights, [faulty, healthy], fault) as fleeting:
        fleeting.publish(0)
        counts = fleeting.sample()
        assert counts[f"rollout/{SAMPLING_FAULTS[fault][0]}"] >= 1
        assert counts["rollout/retries"] >= 1
        fleeting.sample()
        fleeting.publish(1)
        assert fleeting.fleet.version == 1


@pytest.mark.parametrize("fault", list(SAMPLING_FAULTS))
def test_without_others_one_line_says_why(folder: Path, weights: Weights, fault: str) -> None:
    with served(folder, fault) as faulty, fleet_of(folder, weights, [faulty], fault) as fleeting:
        fleeting.publish(0)
        with pytest.raises(GppoError) as ending:
            fleeting.sample()
    assert faulty in str(ending.value)
    assert SAMPLING_FAULTS[fault][1] in str(ending.value)
    assert "\n" not in str(ending.value)


@pytest.mark.parametrize("fault", ["dropped:2:1", "500:2:1", "garbage:2:1"])
def test_one_server_that_fails_once_is_asked_again(folder: Path, weights: Weights, fault: str) -> None:
    with served(folder, fault) as faulty, fleet_of(folder, weights, [faulty], fault) as fleeting:
        fleeting.publish(0)
        assert fleeting.sample()["rollout/retries"] >= 1
        assert fleeting.sample()["rollout/retries"] == 0


@pytest.mark.parametrize("fault", ["dropped@update", "500@update", "garbage@update", "stall@update", "slow-start"])
def test_a_server_that_does_not_take_weights_is_left_out_until_it_does(
    folder: Path, weights: Weights, healthy: str, fault: str
) -> None:
    with mendable(folder, fault) as (faulty, mend), fleet_of(folder, weights, [faulty, healthy], fault) as fleeting:
        fleeting.publish(0)
        mend()
        asked = httpx.get(f"{faulty}/model_info").json()["weight_version"]
        assert asked != "run.0"
        assert fleeting.sample() == dict.fromkeys(fleeting.sample(), 0)
        fleeting.publish(1)
        assert httpx.get(f"{faulty}/model_info").json()["weight_version"] == "run.1"
        fleeting.sample()


@pytest.mark.parametrize("fault", ["dropped@update", "500@update", "garbage@update", "stall@update", "slow-start"])
def test_without_a_server_that_takes_weights_one_line_says_why(folder: Path, weights: Weights, fault: str) -> None:
    with served(folder, fault) as faulty, fleet_of(folder, weights, [faulty], fault) as fleeting:
        line = pytest.raises(SyncError, match=f"no server holds version 0 of the weights: {faulty}: [^\n]+$")
        with line:
            fleeting.publish(0)


def test_wrong_weights_end_the_run_by_the_tensors_name(folder: Path, weights: Weights, healthy: str) -> None:
    with served(folder, "wrong-weights:2") as faulty, fleet_of(folder, weights, [healthy, faulty], "") as fleeting:
        fleeting.publish(0)
        fleeting.sample()
        with pytest.raises(SyncError, match=rf"{faulty} does not hold model\.norm\.weight as it was sent"):
            fleeting.publish(1)
        with pytest.raises(SyncError, match="hold no weights"):
            fleeting.sample()


@pytest.fixture(scope="module")
def healthy_process(model: Path) -> Iterator[Serving]:
    with serving_process(model) as serving:
        yield serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny = load("launchers/recipes/demo.yaml", SHORT).model
    assert isinstance(tiny, TinyModel)
    create_tiny(tiny, path, seed=1)
    return path


GOES_ON, ENDS = "goes on", "ends"
RUNS = {
    "killed:20": (GOES_ON, "servers_lost"),
    "killed@update:2": (GOES_ON, None),
    "wrong-version:20": (GOES_ON, "garbled_replies"),
    "slow-start:1:3": (GOES_ON, None),
    "wrong-weights:2": (ENDS, "does not hold model.norm.weight as it was sent with the weights run-"),
}
"""What a whole run does beside a healthy server, and the count or the line that tells of the fault."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", list(RUNS))
def test_whole_runs(tmp_path: Path, model: Path, healthy_process: Serving, fault: str) -> None:
    ending, told = RUNS[fault]
    with serving_process(model, fault) as faulty:
        urls = (faulty.url, healthy_process.url)
        file = recipe(tmp_path, model, urls, "disk", "steps=3", "warmup.steps=5", "warmup.optimizer.warmup_steps=1")
        process = launch(file)
        _, errors = process.communicate(timeout=800)
    assert "Traceback" not in errors
    assert not left_over(file)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "train" and line["step"] > 0]
    for line in steps:
        assert 0 < line["policy/sampler_gap_max"] < 1e-5
        assert line["rollout/sampled_tokens"] == pytest.approx(line["rollout/length"] * 64)
    if ending == ENDS:
        assert process.returncode not in (0, None)
        said = [
            line for line in errors.splitlines() if line.startswith(faulty.url)
        ]  # others may repeat it as `rank k:`
        assert len(said) == 1, errors
        assert str(told) in said[0]
        return
    assert process.returncode == 0, errors
    assert len(steps) == 3
    assert told is None or sum(line[f"rollout/{told}"] for line in steps) >= 1


def left_over(file: Path) -> list[str]:
    """Processes that still work on this configuration."""
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in commands.splitlines() if str(file) in line]
