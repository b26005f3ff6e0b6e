"""Prompts to groups: sample the responses, judge them, and keep what training needs."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gppo_verifiers.types import Answer, Judge, Status, Verdict

from gppo_megatron.metrics import Mean, StepMetrics, Sum
from gppo_megatron.rollout.engine import Completion, Engine, Request, Sampling
from gppo_megatron.types import Group, Prompt, Trajectory


@dataclass(frozen=True)
class Collector:
    """Samples and judges `group_size` responses a prompt.

    decode: response tokens to the text that is judged, special tokens removed.
    seed: the run's; with equal seeds a response depends only on the weights and on its place in the run.
    """

    engine: Engine
    judge: Judge
    sampling: Sampling
    decode: Callable[[Sequence[int]], str]
    group_size: int
    seed: int

    def collect(self, prompts: Sequence[Prompt], places: Sequence[int], step: int, metrics: StepMetrics) -> list[Group]:
        """One group a prompt, in order.

        places: each prompt's place among all the prompts of `step`. It tells apart two draws of one prompt in one step,
        and makes the samples the same however the prompts are cut over processes.
        metrics: receives `rollout/...` of these prompts; merged over the processes they are the step's.
        """
        requests = [
            request
            for place, prompt in zip(places, prompts, strict=True)
            for request in self.requests(prompt, place, step)
        ]
        groups = self.judged(prompts, self.engine.generate(requests))
        measure(groups, metrics)
        return groups

    def requests(self, prompt: Prompt, place: int, step: int) -> list[Request]:
        """What is asked for one prompt's group."""
        return [
            Request(prompt.token_ids, self.sampling, request_seed(self.seed, step, place, prompt.id, index))
            for index in range(self.group_size)
        ]

    def judged(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Group]:
        """One group a prompt, of the completions of all its requests, end to end."""
        tasks = [prompt.task for prompt in prompts for _ in range(self.group_size)]
        answers = [
            Answer(task, self.decode(completion.token_ids.tolist()))
            for task, completion in zip(tasks, completions, strict=True)
        ]
        verdicts = self.judge.judge(answers)
        judged = list(zip(completions, verdicts, strict=True))
        groups = []
        for place, prompt in enumerate(prompts):
            samples = judged[place * self.group_size : (place + 1) * self.group_size]
            groups.append(Group(prompt, tuple(_trajectory(prompt, *sample) for sample in samples)))
        return groups


def request_seed(seed: int, step: int, place: int, prompt_id: str, index: int) -> int:
    """A seed in [0, 2**63) that is a fixed function of a response's place in the run."""
    name = f"{seed}/{step}/{place}/{index}/{prompt_id}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


def _trajectory(prompt: Prompt, completion: Completion, verdict: Verdict) -> Trajectory:
    before, sampled = len(prompt.token_ids), len(completion.token_ids)
    return Trajectory(
        token_ids=np.concatenate([np.array(prompt.token_ids, dtype=np.int64), completion.token_ids]),
        sampler_logprobs=np.concatenate([np.zeros(before, dtype=np.float32), completion.logprobs]),
        trainable=np.arange(before + sampled) >= before,
        policy_versions=np.concatenate([np.full(before, -1, dtype=np.int64), completion.versions]),
        finish=completion.finish,
        verdict=verdict,
        top=completion.top.after(before) if completion.top is not None else None,
        experts=completion.experts,
    )


def measure(groups: Sequence[Group], metrics: StepMetrics) -> None:
    """`rollout/...` of sampled groups. Every name each time, zero or not: all processes record the same ones."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [score for group in groups for score in group.rewards if score is not None]
    statuses = [trajectory.verdict.status for trajectory in trajectories]
    tokens = sum(int(trajectory.trainable.sum()) for trajectory in trajectories)
    finished = sum(trajectory.finish == "stop" for trajectory in trajectories)
    silent = sum(len(set(group.rewards) - {None}) < 2 for group in groups)
    metrics.add("rollout/reward", Mean(float(sum(scores)), float(len(scores))))
    metrics.add("rollout/no_score", Sum(float(len(trajectories) - len(scores))))
    metrics.add("rollout/finished", Mean(float(finished), float(len(trajectories))))
    metrics.add("rollout/length", Mean(float(tokens), float(len(trajectories))))
    metrics.add("rollout/sampled_tokens", Sum(float(tokens)))
    metrics.add("rollout/groups_without_signal", Mean(float(silent), float(len(groups))))
    for status in Status:
        if status is not Status.GRADED:
            metrics.add(f"rollout/verdict_{status.value}", Sum(float(statuses.count(status))))
