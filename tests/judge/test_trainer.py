"""The trainer's judge: rows of a data set, through the configuration, to verdicts of the real sandbox."""

import json

import pytest
from gppo_verifiers.sandbox.base import IsolationError
from gppo_verifiers.types import Answer, Status, Task

from gppo_megatron.build_judge import open_judge
from gppo_megatron.config.rollouts import EmbeddedRollout
from gppo_megatron.config.schema import FileData, Judge, LocalCode, RunConfig, TinyModel
from gppo_megatron.data.files.programs import program_task
from gppo_megatron.errors import VerifierError

CONFIG = RunConfig(
    run="run",
    steps=1,
    model=TinyModel(),
    data=FileData(path="rows.jsonl", adapter="eurus2_code", template="python_block"),
    rollout=EmbeddedRollout(max_new_tokens=8),
    judge=Judge(code=LocalCode(workers=2, cpu_seconds=1.0, memory_mib=128)),
)
ADD = program_task(json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7.0000001\n"]}))
CALL = program_task(json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}))


def block(source: str) -> str:
    return f"<think>Hm.</think>So:\n```python\n{source}\n```\n"


def test_answers_are_judged_as_the_configuration_says():
    judge = open_judge(CONFIG)
    cases = [
        (ADD, block("a, b = map(int, input().split())\nprint(float(a + b))"), 1.0, Status.GRADED),
        (ADD, block("print(3)"), 0.0, Status.GRADED),
        (CALL, block("class Solution:\n    def add(self, a, b):\n        return a + b"), 1.0, Status.GRADED),
        (CALL, block("def add(a, b):\n    return a - b"), 0.0, Status.GRADED),
        (ADD, block("while True: pass"), 0.0, Status.GRADED),
        (ADD, block("print(len(b'x' * (300 << 20)))"), 0.0, Status.GRADED),
        (ADD, "3", 0.0, Status.UNPARSABLE),
        (Task("math", {"gold": "5", "extractor": "boxed"}), "\\boxed{5}", 1.0, Status.GRADED),
        (Task("code", {**ADD.payload, "language": "cpp"}), block("print(3)"), None, Status.CRASH),
    ]
    try:
        verdicts = judge.judge([Answer(task, text) for task, text, *_ in cases])
    finally:
        judge.close()
    assert [(verdict.score, verdict.status) for verdict in verdicts] == [(score, status) for *_, score, status in cases]
    assert [verdict.detail.split()[0] for verdict in verdicts[4:6]] == ["TLE", "MLE"]


def test_a_machine_that_cannot_isolate_programs_starts_no_run(monkeypatch):
    def refuse():
        raise IsolationError("no control groups")

    monkeypatch.setattr("gppo_megatron.build_judge.SANDBOXES", {"zygote": refuse})
    with pytest.raises(VerifierError, match="judge.code: programs cannot be run safely here: no control groups"):
        open_judge(CONFIG)
