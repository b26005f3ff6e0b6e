"""What the service and its client write to each other: answers to judge and verdicts, as JSON.

    POST /v1/jobs      {"jobs": [{"key": "...", "kind": "code", "payload": {...}, "text": "..."}]}
                    -> {"keys": ["..."]}, those that were taken
    POST /v1/results   {"keys": ["..."], "wait": 20}
                    -> {"verdicts": {"...": {"score": 1.0, "status": "graded", "detail": "AC"}},
                        "pending": ["..."], "unknown": ["..."]}

A key is the client's name for one answer. Sent again, it is the same job; with other content it is a mistake. A key
whose verdict is `infra` may be sent again, and is then judged again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gppo_verifiers.types import Answer, Status, Task, Verdict

JOBS, RESULTS, HEALTH, METRICS = "/v1/jobs", "/v1/results", "/health", "/metrics"
LARGEST_BATCH = 256
"""Jobs, or keys, in one request."""


@dataclass(frozen=True)
class Job:
    """An answer to judge, under its key."""

    key: str
    answer: Answer


def to_bytes(value: Any) -> bytes:
    """JSON in ASCII, so that half a surrogate pair passes. Raises ValueError, TypeError, RecursionError."""
    return json.dumps(value).encode()


def job_to_json(job: Job) -> dict[str, Any]:
    task = job.answer.task
    return {"key": job.key, "kind": task.kind, "payload": dict(task.payload), "text": job.answer.text}


def job_from_json(given: Any) -> Job:
    """Raises ValueError for what is no job."""
    match given:
        case {"key": str(key), "kind": str(kind), "payload": dict(payload), "text": str(text)} if key:
            return Job(key, Answer(Task(kind, payload), text))
    raise ValueError(f"a job has a key, a kind, a payload and a text: {str(given)[:100]}")


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    return {"score": verdict.score, "status": verdict.status.value, "detail": verdict.detail}


def verdict_from_json(given: Mapping[str, Any]) -> Verdict:
    """Raises ValueError for what is no verdict."""
    match given:
        case {"score": None | int() | float() as score, "status": str(status), "detail": str(detail)}:
            return Verdict(score, Status(status), detail)
    raise ValueError(f"no verdict: {str(given)[:100]}")
