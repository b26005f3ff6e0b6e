"""A run that starts the real SGLang itself: a server that is killed comes back, with the right weights."""

import signal
from pathlib import Path

import psutil
import pytest

from gppo_megatron.config.started import StartSglang
from tests.e2e.test_servers import launch
from tests.e2e.test_started_servers import ended, ports, recipe, server_at, steps_of, wait, weights_at
from tests.servers.sglang_process import ARGUMENTS, SETTINGS, START_SECONDS, environment


@pytest.mark.timeout(4 * START_SECONDS)
def test_a_killed_server_is_started_again_and_samples_with_the_right_weights(tmp_path: Path) -> None:
    start = StartSglang(
        python=str(environment() / "bin" / "python"),
        count=2,
        port=ports(2),
        arguments=ARGUMENTS,
        environment=SETTINGS,
    )
    process = launch(recipe(tmp_path, start, "steps=20000", "evaluation.every=20000"))
    wait(process, lambda: len(steps_of(tmp_path)) >= 1, START_SECONDS)
    killed = server_at(tmp_path, start.urls[1])
    assert killed is not None
    family = killed.children(recursive=True)  # under names of their own, without the run's folder
    assert family
    killed.kill()
    killed.wait(START_SECONDS)
    wait(process, lambda: weights_at(start.urls[1]).startswith("run-"), START_SECONDS)
    assert psutil.wait_procs(family, START_SECONDS)[1] == []
    back = len(steps_of(tmp_path))
    wait(process, lambda: len(steps_of(tmp_path)) >= back + 3, START_SECONDS)
    servers = [server for url in start.urls if (server := server_at(tmp_path, url)) is not None]
    families = [each for server in servers for each in server.children(recursive=True)]
    assert len(servers) == 2
    process.send_signal(signal.SIGTERM)
    status, errors = ended(process, tmp_path)
    assert status == 128 + signal.SIGTERM, errors
    assert psutil.wait_procs(families, START_SECONDS)[1] == []
    assert f"rollout server {start.urls[1]} was killed by signal SIGKILL; started again (1 of 3 times" in errors
    steps = steps_of(tmp_path)
    print(f"{len(steps)} steps, {back} before it was back; gaps: " + str(max(s["policy/sampler_gap"] for s in steps)))
    for line in steps:
        assert 0 < line["policy/sampler_gap"] < 2e-6
        assert line["policy/sampler_gap_max"] < 1e-4
        assert line["rollout/garbled_replies"] == 0
