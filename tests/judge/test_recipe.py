"""The demo in which a tiny model writes programs: a few steps of it, judged by the real sandbox."""

import json
import subprocess
import sys

from gppo_verifiers.code.jobs import job_of
from gppo_verifiers.sandbox.base import Limits

from gppo_megatron.data.files.programs import program_task

SHORT = (
    "warmup.steps=4",
    "warmup.optimizer.warmup_steps=1",
    "steps=2",
    "batch.sequences=16",
    "batch.updates=2",
    "evaluation.prompts=4",
)
SHORT += ("evaluation.samples=2", "evaluation.every=2", "model.hidden=32", "rollout.max_new_tokens=20")


def test_programs_are_sampled_judged_and_trained_on(tmp_path):
    command = [sys.executable, "-m", "gppo_megatron", "launch", "launchers/recipes/code.yaml", f"run={tmp_path}/run"]
    done = subprocess.run([*command, *SHORT], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["stage"] == "train" and line["step"] > 0]
    assert [line["step"] for line in trained] == [1, 2]
    for line in trained:
        assert line["rollout/no_score"] == 0.0
        assert line["rollout/verdict_unparsable"] == 0.0
        assert 0.0 <= line["rollout/reward"] <= 1.0
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


def test_every_solution_of_the_recipe_is_right(grader):
    with open("launchers/recipes/code.jsonl") as file:
        rows = [json.loads(line) for line in file]
    prompts = {row["prompt"] for row in rows}
    assert len(rows) == len(prompts) == 500
    limits = Limits(cpu_seconds=1.0, wall_seconds=10.0)
    for row in rows[::25]:
        payload = {**program_task(row["tests"]).payload, "answer": "whole"}
        assert grader.grade(job_of(payload, row["solution"], limits)).score == 1.0
        wrong = row["solution"].replace("x:(x", "x:(x+1")
        assert grader.grade(job_of(payload, wrong, limits)).score == 0.0
