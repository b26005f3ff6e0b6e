"""The sections `objective:` and `diagnostics:`: what is optimised, and what is measured beside it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TruncatedSampling:
    """Weight min(k, cap), k = recomputed anchor / sampler: of the token, or the product over its sequence."""

    kind: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    cap: float = 2.0


@dataclass(frozen=True)
class MaskedSampling:
    """Weight k where low <= k <= high, else 0."""

    kind: Literal["mis"] = "mis"
    level: Literal["token", "sequence"] = "token"
    low: float = 0.5
    high: float = 5.0


@dataclass(frozen=True)
class SequenceRejection:
    """No loss on sequences whose mean, or largest, k - 1 - log k exceeds `limit` (nats)."""

    limit: float
    kind: Literal["reject"] = "reject"
    statistic: Literal["mean", "largest"] = "mean"


@dataclass(frozen=True)
class OffPolicyRejection:
    """No loss on sequences with A < 0 whose mean of log(sampler / policy) exceeds `limit` (nats)."""

    limit: float
    kind: Literal["opsm"] = "opsm"


@dataclass(frozen=True)
class ReferenceKl:
    """coefficient x KL(policy || reference), see docs/objective.md for what each estimator's gradient really is."""

    coefficient: float
    kind: Literal["kl"] = "kl"
    estimator: Literal["k1", "k2", "k3", "k1_in_reward"] = "k2"


@dataclass(frozen=True)
class EntropyBonus:
    """-coefficient x entropy (nats) of each loss token's distribution."""

    coefficient: float
    kind: Literal["entropy"] = "entropy"


@dataclass(frozen=True)
class Objective:
    """A preset, and whatever of it is to be changed; None keeps the preset's value.

    surrogate: how the trust region acts, see `objective.presets`.
    delta sets both thresholds, delta_low (A < 0, ratio below 1) and delta_high (A > 0, ratio above 1) one each.
    topk: how many of the sampler's likeliest tokens the estimator `topk` tells apart, 20 where it is null.
    ratio_cap: largest weight a token's ratio may have. dual_clip: largest weight where A < 0.
    ratio_guard: [low, high], an outer ratio interval on top of the cell.
    length: the constant of `constant_length`; defaults to rollout.max_new_tokens.
    corrections: weights on each token's loss; auxiliary: terms added to it.
    routing: which experts the policy sends a sampled token to while it trains: those of its `own` choice, or the
        sampler's, `replayed`.
    reference: Hugging Face folder of the frozen reference policy of a KL term; null: the policy as `steps` begin.
    """

    preset: str = "gppo"
    surrogate: Literal["mask", "penalty", "sequence_mask", "geometric_mean"] | None = None
    divergence: str | None = None
    alpha: float | None = None
    estimator: str | None = None
    topk: int | None = None
    delta: float | None = None
    delta_low: float | None = None
    delta_high: float | None = None
    ratio_cap: float | None = None
    dual_clip: float | None = None
    ratio_guard: tuple[float, float] | None = None
    advantage: Literal["mean", "mean_std", "leave_one_out"] | None = None
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] | None = None
    length: int | None = None
    anchor: Literal["rollout", "recomputed"] = "rollout"
    corrections: tuple[TruncatedSampling | MaskedSampling | SequenceRejection | OffPolicyRejection, ...] = ()
    auxiliary: tuple[ReferenceKl | EntropyBonus, ...] = ()
    routing: Literal["own", "replayed"] = "own"
    reference: str | None = None


@dataclass(frozen=True)
class Diagnostics:
    """What is measured beside the loss at every step; none of it changes the training.

    estimators: whose mean, maximum and share above each of `thresholds` are reported.
    masked: shares masked by the advantage's sign and the token's probability. bound: terms of the improvement bound.
    exact_sample: of how many tokens a micro-batch the exact divergence is worked out, and how often `estimators` decide
        otherwise; 0: none. Where the objective's estimator is `exact`, of all of them without this.
    peak_tflops: 10^12 operations a second that a process's device can do at most, for `speed/mfu`; null: as its maker
        says of a known GPU in bfloat16.
    """

    estimators: tuple[str, ...] = ("mc", "atomic", "binary")
    thresholds: tuple[float, ...] = (0.01, 0.1)
    masked: bool = True
    bound: bool = True
    exact_sample: int = 0
    peak_tflops: float | None = None
