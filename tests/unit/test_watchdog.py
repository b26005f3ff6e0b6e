"""The watchdog with a clock of the test's, and SIGTERM as a wish."""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gppo_megatron.observe.stop_request import StopRequest
from gppo_megatron.observe.watchdog import Deadlines, Watchdog

DEADLINES = Deadlines(silence=10, phase=100, grace=5)


@dataclass
class World:
    """Watchdogs of one run, on one clock, and how their processes ended."""

    folder: Path
    size: int
    now: float = 0.0
    ends: list[tuple[int, int]] = field(default_factory=list)

    def watchdog(self, rank: int, deadlines: Deadlines = DEADLINES, stop: StopRequest | None = None) -> Watchdog:
        self.folder.mkdir(exist_ok=True)
        return Watchdog(
            self.folder, rank, self.size, deadlines, stop or StopRequest(),
            clock=lambda: self.now, end=lambda status: self.ends.append((rank, status)),
        )  # fmt: skip


def test_a_process_that_falls_silent_is_named_within_its_deadline(tmp_path: Path) -> None:
    world = World(tmp_path / "alive", 3)
    zero, one, two = (world.watchdog(rank) for rank in range(3))
    one.enter("train 7: update")
    for _ in range(20):
        world.now += 1
        assert [dog.look() for dog in (one, two, zero)] == [None] * 3
    for _ in range(9):  # rank 1 is stopped
        world.now += 1
        assert [dog.look() for dog in (two, zero)] == [None] * 2
    world.now += 2
    assert two.look() is None  # watches rank 0
    named = zero.look()
    assert named is not None
    assert named.startswith(f"rank 1 (pid {os.getpid()} on ")
    assert "has given no sign of life for watchdog.silence = 10 s; it was last seen in train 7: update" in named


def test_a_process_that_never_came_is_named(tmp_path: Path) -> None:
    world = World(tmp_path / "alive", 2)
    zero = world.watchdog(0)
    assert zero.look() is None
    world.now = 10.5
    assert zero.look() == (
        "rank 1 has given no sign of life for watchdog.silence = 10 s; it never gave one. "
        "It is stopped, starved, or its node is gone"
    )


def test_a_watchdog_that_was_itself_held_up_blames_nobody(tmp_path: Path) -> None:
    world = World(tmp_path / "alive", 2)
    zero, one = world.watchdog(0), world.watchdog(1)
    one.look()
    assert zero.look() is None
    world.now = 50
    one.look()
    assert zero.look() is None


def test_who_is_behind_is_named_when_a_phase_takes_too_long(tmp_path: Path) -> None:
    world = World(tmp_path / "alive", 2)
    zero, one = world.watchdog(0), world.watchdog(1)
    for dog in (zero, one):
        dog.enter("train 2: rollout")
    zero.enter("train 2: update")
    for _ in range(100):
        world.now += 1
        assert [one.look(), zero.look()] == [None, None]
    world.now += 1
    named = zero.look()
    assert named is not None
    assert named.startswith("rank 1 (pid ")
    assert named.endswith(
        "is still in train 2: rollout, while rank 0 has been in train 2: update for watchdog.phase = 100 s"
    )
    one.enter("train 2: update")
    one.look()
    assert "every process has been in train 2: update" in str(zero.look())
    zero.enter("train 2: publish")
    assert zero.look() is None


def test_an_alarm_ends_every_process_with_its_stacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deadlines = Deadlines(silence=0.2, phase=60, grace=60)
    ends: list[int] = []
    dogs = [Watchdog(tmp_path / "alive", rank, 3, deadlines, StopRequest(), end=ends.append) for rank in (0, 1)]
    deadline = time.monotonic() + 20
    with dogs[0], dogs[1]:  # rank 2 never comes
        while len(ends) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert ends == [76, 76]
    said = capfd.readouterr().err
    assert "rank 2 has given no sign of life" in said
    assert said.count("its threads:") == 2
    assert "test_an_alarm_ends_every_process" in said  # the main thread's stack


def test_closed_watchdogs_leave_no_sign(tmp_path: Path) -> None:
    deadline = time.monotonic() + 10
    with Watchdog(tmp_path / "alive", 0, 1, DEADLINES, StopRequest()) as dog:
        while dog.read(0) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert dog.read(0) is not None
    assert list((tmp_path / "alive").iterdir()) == []


def test_sigterm_is_noted_by_both_threads_and_kills_nobody() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()
    heard: list[bool] = []
    with stop:
        assert not stop.came()
        assert not stop.wait(0.01)
        listener = threading.Thread(target=lambda: heard.append(stop.wait(10)))
        listener.start()
        os.kill(os.getpid(), signal.SIGTERM)
        listener.join()
        assert stop.came()
    assert heard == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_that_outlives_the_grace_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stop, ends = StopRequest(), list[int]()
    dog = Watchdog(tmp_path / "alive", 0, 1, Deadlines(60, 60, grace=0.3), stop, end=ends.append)
    with stop, dog:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 20
        while not ends and time.monotonic() < deadline:
            time.sleep(0.02)
    assert ends == [143]
    assert "SIGTERM came, and this step did not end within save.grace = 0.3 s" in capfd.readouterr().err
