"""Which verifier judges which kind of task; a new kind is one row."""

from gppo_verifiers.reasoning import grade as grade_reasoning
from gppo_verifiers.worker import Verifier

VERIFIERS: dict[str, Verifier] = {
    "reasoning_gym": grade_reasoning,
}
