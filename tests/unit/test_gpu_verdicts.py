"""The GPU checks on a machine without one: what they say then, and that they would notice a difference."""

import subprocess
from functools import partial

import pytest
import torch

from gppo_megatron.config.schema import Fp8
from tests.gpu import checks, verdicts
from tests.gpu.__main__ import main
from tests.gpu.checks import CHECKS, Step, checksum, payload
from tests.gpu.verdicts import FAILED, NO_GPU, SKIPPED, Skipped, Verdict, in_a_process, one, table
from tests.single_process import CPU


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == NO_GPU == 77
    assert capsys.readouterr().out == "torch sees no GPU here: nothing was verified\n"


def fails() -> str:
    raise AssertionError("off by 2")


def skips() -> str:
    raise Skipped("one GPU alone")


def test_one_check_ends_with_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert [one("a", lambda: "fine"), one("b", fails), one("c", skips)] == [0, FAILED, SKIPPED]
    assert capsys.readouterr().out.splitlines() == ["fine", "b: off by 2", "one GPU alone"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = dict(zip(CHECKS, ["PASS", "SKIP", "FAIL"] * 3, strict=True))
    assert table("2 x card", CHECKS, lambda name: Verdict(name, outcomes[name], "said")) == FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 x card"
    assert lines[1] == f"PASS  {'float32 step':<34}said"
    assert lines[-1] == "3 passed, 3 failed, 3 could not be taken here"
    assert table("card", CHECKS, lambda name: Verdict(name, "SKIP", "")) == 0


@pytest.mark.parametrize(
    ("program", "outcome", "said"),
    [
        ("print('noise'); print('off by 1e-6')", "PASS", "off by 1e-6"),
        ("print('why not'); raise SystemExit(3)", "SKIP", "why not"),
        ("print('x: off by 2'); raise SystemExit(1)", "FAIL", "x: off by 2"),
        ("raise RuntimeError('CUDA error: an illegal access')", "FAIL", "RuntimeError: CUDA error: an illegal access"),
        ("print('began'); import os; os.abort()", "FAIL", "began"),
    ],
)
def test_a_crash_costs_one_line(program: str, outcome: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def run(command: list[str], **options: object) -> object:
        assert command[1:] == ["-u", "-W", "ignore", "-m", "tests.gpu", "Triton head"]
        return real([*command[:2], "-c", program], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(verdicts.subprocess, "run", run)
    assert in_a_process("Triton head") == Verdict("Triton head", outcome, said)


def test_the_float32_step_can_be_taken_on_a_cpu() -> None:
    said = CHECKS["float32 step"](CPU)
    assert "at most 0.001" in said
    assert float(said.split("off by ")[1].split()[0]) < 2e-5


def test_a_wrong_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "step_of_transformers", lambda folder: Step(1.0, 1.0))
    with pytest.raises(AssertionError, match=r"loss .*: off by .*, more than 0.001"):
        CHECKS["float32 step"](CPU)


def test_what_a_cpu_cannot_take_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, check in CHECKS.items():
        if "step" not in name or "FP8" in name:
            with pytest.raises(Skipped, match=r"\S"):
                check(CPU)


def test_packing_is_compared_with_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CPU's own attention, which packs too."""
    monkeypatch.setattr(checks, "HAVE_TRANSFORMER_ENGINE", True)
    assert "largest gap" in CHECKS["packing (THD)"](CPU)
    monkeypatch.setattr(checks, "scores", lambda policy, micro: micro.tokens_T.cumsum(0).float())
    with pytest.raises(AssertionError, match="another sequence's tokens changed this one's"):
        CHECKS["packing (THD)"](CPU)


def test_fp8_must_be_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "possible", lambda *_: None)
    monkeypatch.setattr(checks, "step", lambda folder, device, precision: Step(1.0, 2.0))
    with pytest.raises(AssertionError, match="no product was in FP8"):
        partial(checks.fp8_step_against_bfloat16, Fp8(), 0.1)(CPU)


def test_a_checksum_knows_the_order_of_bytes() -> None:
    sent = payload()[:1000]
    assert checksum(sent) == checksum(sent.clone())
    assert checksum(sent) != checksum(sent.flip(0))
    assert checksum(sent) != checksum(sent + 1)
