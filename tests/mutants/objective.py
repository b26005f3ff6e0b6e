"""Faults in the objective: losses, trust regions, divergences, advantages and denominators."""

from tests.mutants.fault import Fault

GRADIENT, GRADIENT_TEST = "gppo_megatron/objective/policy_gradient.py", "tests/numeric/test_policy_gradient.py"
REGION, REGION_TEST = "gppo_megatron/objective/trust_region.py", "tests/numeric/test_trust_region.py"
DIVERGENCES, DIVERGENCES_TEST = "gppo_megatron/objective/divergences.py", "tests/numeric/test_divergences.py"
ESTIMATORS = "gppo_megatron/objective/estimators.py"
ADVANTAGES, ADVANTAGES_TEST = "gppo_megatron/objective/advantages.py", "tests/unit/test_advantages.py"
REDUCE, REDUCE_TEST = "gppo_megatron/objective/reduce.py", "tests/unit/test_reduce.py"

SELECTED = "gppo_megatron/objective/selected.py"
SEQUENCE, SEQUENCE_TEST = "gppo_megatron/objective/sequence.py", "tests/numeric/test_sequence.py"
PENALTIES, PENALTIES_TEST = "gppo_megatron/objective/penalties.py", "tests/numeric/test_penalties.py"
CORRECTIONS, CORRECTIONS_TEST = "gppo_megatron/objective/corrections.py", "tests/numeric/test_corrections.py"
AUXILIARY, AUXILIARY_TEST = "gppo_megatron/objective/auxiliary.py", "tests/numeric/test_auxiliary.py"
DIAGNOSTICS, DIAGNOSTICS_TEST = "gppo_megatron/objective/diagnostics.py", "tests/numeric/test_diagnostics.py"

LOSSES = (
    Fault(
        "loss-sign-flipped",
        GRADIENT,
        "TokenLoss(-coefficient_T * ",
        "TokenLoss(coefficient_T * ",
        GRADIENT_TEST,
    ),
    Fault(
        "likelihood-sign-flipped",
        GRADIENT,
        "loss_T = -only(valid_T, streams.logprobs_T)",
        "loss_T = only(valid_T, streams.logprobs_T)",
        GRADIENT_TEST,
    ),
    Fault(
        "importance-weight-forgotten",
        GRADIENT,
        "advantages_T * ratio_T.clamp_max(cap), 0.0",
        "advantages_T, 0.0",
        GRADIENT_TEST,
    ),
    Fault(
        "coefficient-by-product-leaks-nan",
        GRADIENT,
        "torch.where(trained_T, advantages_T * ratio_T.clamp_max(cap), 0.0)",
        "trained_T * (advantages_T * ratio_T.clamp_max(cap))",
        GRADIENT_TEST,
    ),
    Fault(
        "log-prob-by-product-leaks-nan",
        SELECTED,
        "return torch.where(selected_T, at_least_float32(values_T), 0.0)",
        "return selected_T * at_least_float32(values_T)",
        GRADIENT_TEST,
    ),
    Fault(
        "loss-outside-the-mask",
        GRADIENT,
        "trained_T = streams.mask_T & decision.keep_T & ~dropped_T",
        "trained_T = decision.keep_T & ~dropped_T",
        GRADIENT_TEST,
    ),
    Fault(
        "trust-region-ignored",
        GRADIENT,
        "trained_T = streams.mask_T & decision.keep_T & ~dropped_T",
        "trained_T = streams.mask_T & decision.finite_T & ~dropped_T",
        GRADIENT_TEST,
    ),
    Fault(
        "ratio-cap-ignored",
        GRADIENT,
        "ratio_T.clamp_max(cap)",
        "ratio_T",
        GRADIENT_TEST,
    ),
    Fault(
        "dual-clip-on-the-wrong-sign",
        GRADIENT,
        "dropped_T = (advantages_T < 0) & (ratio_T > dual)",
        "dropped_T = (advantages_T > 0) & (ratio_T > dual)",
        GRADIENT_TEST,
    ),
)

REGIONS = (
    Fault(
        "thresholds-swapped",
        REGION,
        "(up_T & (divergence_T > self.cell.delta_high)) | (down_T & (divergence_T > self.cell.delta_low))",
        "(up_T & (divergence_T > self.cell.delta_low)) | (down_T & (divergence_T > self.cell.delta_high))",
        REGION_TEST,
    ),
    Fault(
        "threshold-itself-masked",
        REGION,
        "divergence_T > self.cell.delta_high",
        "divergence_T >= self.cell.delta_high",
        REGION_TEST,
    ),
    Fault(
        "outward-test-reversed",
        REGION,
        "up_T = (advantages_T > 0) & (log_pi_T > log_mu_T)",
        "up_T = (advantages_T > 0) & (log_pi_T < log_mu_T)",
        REGION_TEST,
    ),
    Fault(
        "inward-moves-masked-too",
        REGION,
        "down_T = (advantages_T < 0) & (log_pi_T < log_mu_T)",
        "down_T = advantages_T < 0",
        REGION_TEST,
    ),
    Fault(
        "ratio-guard-ignored",
        REGION,
        "if self.cell.ratio_guard is not None:",
        "if False:",
        REGION_TEST,
    ),
    Fault(
        "tokens-that-are-not-finite-kept",
        REGION,
        "Decision(finite_T & ~outside_T, finite_T, divergence_T)",
        "Decision(~outside_T, finite_T, divergence_T)",
        REGION_TEST,
    ),
)

MEASURES = (
    Fault(
        "kl-direction-swapped",
        DIVERGENCES,
        "_KL_FORWARD,  # r - 1 - log r",
        "_KL_REVERSE,  # r - 1 - log r",
        DIVERGENCES_TEST,
    ),
    Fault(
        "kl-weighted-by-the-policy",
        DIVERGENCES,
        "surprise_T = torch.exp(log_mu_T) * ",
        "surprise_T = torch.exp(log_pi_T) * ",
        DIVERGENCES_TEST,
    ),
    Fault(
        "total-variation-not-halved",
        DIVERGENCES,
        "difference(log_pi_T, log_mu_T).abs() / 2",
        "difference(log_pi_T, log_mu_T).abs()",
        DIVERGENCES_TEST,
    ),
    Fault(
        "chi-squared-directions-swapped",
        DIVERGENCES,
        "return _chi_squared_pearson(log_mu_T, log_pi_T)",
        "return _chi_squared_pearson(log_pi_T, log_mu_T)",
        DIVERGENCES_TEST,
    ),
    Fault(
        "alpha-not-mirrored",
        DIVERGENCES,
        "small_alpha(1 - alpha, log_mu_T, log_pi_T)",
        "small_alpha(1 - alpha, log_pi_T, log_mu_T)",
        DIVERGENCES_TEST,
    ),
    Fault(
        "binary-rest-swapped",
        ESTIMATORS,
        "generator.atomic(log_complement(log_pi_T), log_complement(log_mu_T))",
        "generator.atomic(log_complement(log_mu_T), log_complement(log_pi_T))",
        DIVERGENCES_TEST,
    ),
    Fault(
        "certain-token-divided-by-zero",
        ESTIMATORS,
        "log_p_T = log_p_T.clamp_max(LARGEST_LOG_PROBABILITY[log_p_T.dtype])",
        "log_p_T = log_p_T.clamp_max(0.0)",
        DIVERGENCES_TEST,
    ),
    Fault(
        "rest-of-the-vocabulary-forgotten",
        ESTIMATORS,
        " + others_T + generator.atoms(log_pi_rest_T, log_mu_rest_T)",
        " + others_T",
        "tests/numeric/test_divergence_shards.py",
    ),
    Fault(
        "limits-of-an-atom-swapped",
        DIVERGENCES,
        "torch.where(no_mu_T, _weighted(log_pi_T, self.slope), atoms_T)",
        "torch.where(no_mu_T, _weighted(log_pi_T, self.at_zero), atoms_T)",
        "tests/numeric/test_divergence_shards.py",
    ),
    Fault(
        "preset-with-twice-the-threshold",
        "gppo_megatron/objective/presets.py",
        '"ppo": Preset(Cell("tv", "mc", 0.1, 0.1))',
        '"ppo": Preset(Cell("tv", "mc", 0.2, 0.2))',
        GRADIENT_TEST,
    ),
)

BASELINES = (
    Fault(
        "baseline-without-the-first-member",
        ADVANTAGES,
        "baseline = fmean(scored)",
        "baseline = fmean(scored[1:])",
        ADVANTAGES_TEST,
    ),
    Fault(
        "leave-one-out-leaves-none-out",
        ADVANTAGES,
        "[advantage * len(scored) / (len(scored) - 1) for advantage in _centred(scored)]",
        "_centred(scored)",
        ADVANTAGES_TEST,
    ),
    Fault(
        "standard-deviation-of-equal-rewards",
        ADVANTAGES,
        "informative = len(set(scored)) > 1",
        "informative = len(scored) > 1",
        ADVANTAGES_TEST,
    ),
    Fault(
        "standard-deviation-of-the-population",
        ADVANTAGES,
        "from statistics import fmean, stdev",
        "from statistics import fmean\nfrom statistics import pstdev as stdev",
        ADVANTAGES_TEST,
    ),
)

DENOMINATORS = (
    Fault(
        "sequence-mean-over-tokens",
        REDUCE,
        "lambda own_T, counts: own_T * counts.sequences",
        "lambda own_T, counts: own_T * counts.tokens",
        REDUCE_TEST,
    ),
    Fault(
        "sequence-mean-over-all-lengths",
        REDUCE,
        "lambda own_T, counts: own_T * counts.sequences",
        "lambda own_T, counts: own_T.mean() * counts.sequences",
        REDUCE_TEST,
    ),
    Fault(
        "constant-length-of-one-sequence",
        REDUCE,
        "torch.full_like(own_T, counts.sequences * counts.length)",
        "torch.full_like(own_T, counts.length)",
        REDUCE_TEST,
    ),
    Fault(
        "total-by-product-leaks-nan",
        REDUCE,
        "(torch.where(share_T > 0, loss_T, 0.0) * share_T).sum()",
        "(loss_T * share_T).sum()",
        REDUCE_TEST,
    ),
)

FAMILY = (
    Fault(
        "sequence-ratio-summed",
        SEQUENCE,
        "return (self.sums(values_T.detach()) / self.counts_B.clamp_min(1))[self.sequence_T]",
        "return self.sums(values_T.detach())[self.sequence_T]",
        SEQUENCE_TEST,
    ),
    Fault(
        "sequence-ratio-over-tokens-without-loss",
        SEQUENCE,
        "        values_T = only(self.mask_T, values_T)\n        return values_T.new_zeros",
        "        return values_T.new_zeros",
        SEQUENCE_TEST,
    ),
    Fault(
        "sequence-ratio-without-the-anchors-mean",
        SEQUENCE,
        "anchor_logprobs_T=sequences.means(streams.anchor_logprobs_T),",
        "anchor_logprobs_T=streams.anchor_logprobs_T,",
        SEQUENCE_TEST,
    ),
    Fault(
        "geometric-mean-of-unclipped-ratios",
        SEQUENCE,
        "clipped_T = torch.where(decision.keep_T, log_ratio_T, bound_T)",
        "clipped_T = log_ratio_T",
        SEQUENCE_TEST,
    ),
    Fault(
        "geometric-mean-of-half-a-broken-sequence",
        SEQUENCE,
        "usable_T = sequences.all_have(decision.finite_T)",
        "usable_T = decision.finite_T",
        SEQUENCE_TEST,
    ),
    Fault(
        "penalty-without-its-pull",
        PENALTIES,
        "- streams.advantages_T.abs() * slope_T / delta_T",
        "- 0 * slope_T / delta_T",
        PENALTIES_TEST,
    ),
    Fault(
        "penalty-thresholds-swapped",
        PENALTIES,
        "torch.where(log_ratio_T < 0, self.cell.delta_low, high_T)",
        "torch.where(log_ratio_T > 0, self.cell.delta_low, high_T)",
        PENALTIES_TEST,
    ),
    Fault(
        "mismatch-inverted",
        CORRECTIONS,
        "log_k_T = _log_ratio(streams.anchor_logprobs_T, streams.sampler_logprobs_T)\n    if level",
        "log_k_T = _log_ratio(streams.sampler_logprobs_T, streams.anchor_logprobs_T)\n    if level",
        CORRECTIONS_TEST,
    ),
    Fault(
        "truncation-forgotten",
        CORRECTIONS,
        "return Correction(weight_T.clamp_max(self.cap), metrics)",
        "return Correction(weight_T, metrics)",
        CORRECTIONS_TEST,
    ),
    Fault(
        "off-policy-rejection-of-good-answers",
        CORRECTIONS,
        "(streams.advantages_T < 0) & (mean_T > self.limit)",
        "(streams.advantages_T > 0) & (mean_T > self.limit)",
        CORRECTIONS_TEST,
    ),
    Fault(
        "correction-by-product-leaks-nan",
        CORRECTIONS,
        "weight_T = torch.where(streams.mask_T & ~undefined_T, weight_T, 0.0)",
        "weight_T = weight_T * (streams.mask_T & ~undefined_T)",
        CORRECTIONS_TEST,
    ),
    Fault(
        "k3-in-the-other-direction",
        AUXILIARY,
        "log_ratio_T = (reference_T - log_pi_T).clamp(",
        "log_ratio_T = (log_pi_T - reference_T).clamp(",
        AUXILIARY_TEST,
    ),
    Fault(
        "kl-of-rewards-blind-to-later-tokens",
        AUXILIARY,
        "return (cost_T + Sequences.of(streams).later(cost_T)) * log_pi_T",
        "return cost_T * log_pi_T",
        AUXILIARY_TEST,
    ),
    Fault(
        "entropy-bonus-lowers-the-entropy",
        AUXILIARY,
        "loss_T = -self.coefficient * only(",
        "loss_T = self.coefficient * only(",
        AUXILIARY_TEST,
    ),
    Fault(
        "masked-shares-of-the-other-sign",
        DIAGNOSTICS,
        "bands * (advantages_T < 0)",
        "bands * (advantages_T > 0)",
        DIAGNOSTICS_TEST,
    ),
    Fault(
        "remainder-of-the-token-itself",
        DIAGNOSTICS,
        "torch.stack([log_ratio_T, sequences.later(log_ratio_T)])",
        "torch.stack([log_ratio_T, sequences.later(log_ratio_T) + log_ratio_T])",
        DIAGNOSTICS_TEST,
    ),
    Fault(
        "tokens-without-the-exact-divergence-compared",
        DIAGNOSTICS,
        "measured.valid_T & best.finite_T & (advantages_T != 0)",
        "measured.valid_T & (advantages_T != 0)",
        DIAGNOSTICS_TEST,
    ),
    Fault(
        "last-micro-batch-alone-diagnosed",
        DIAGNOSTICS,
        "joined([one.streams for one in step]), torch.cat(kept) if kept else None)",
        "joined([one.streams for one in step[-1:]]), kept[-1] if kept else None)",
        DIAGNOSTICS_TEST,
    ),
    Fault(
        "tokens-without-an-estimate-in-its-tail",
        DIAGNOSTICS,
        "of_all.unbind() for of_all in flags_FET.sum(2,",
        "of_all.unbind() for of_all in flags_FET.logical_or(~finite_ET).sum(2,",
        DIAGNOSTICS_TEST,
    ),
    Fault(
        "largest-of-nothing-is-zero",
        SELECTED,
        "values_T.new_full((1,), -torch.inf)",
        "values_T.new_full((1,), 0.0)",
        GRADIENT_TEST,
    ),
)

FAULTS = (*LOSSES, *REGIONS, *MEASURES, *BASELINES, *DENOMINATORS, *FAMILY)
