"""Which verifier judges which kind of task; a new kind is one row."""

from gppo_verifiers.math.grading import grade as grade_math
from gppo_verifiers.reasoning import grade as grade_reasoning
from gppo_verifiers.worker import Verifier

VERIFIERS: dict[str, Verifier] = {
    "math": grade_math,
    "reasoning_gym": grade_reasoning,
}
