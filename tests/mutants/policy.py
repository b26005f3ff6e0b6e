"""Faults in the Megatron policy: its head, its weights, its model, its optimizer."""

from tests.mutants.fault import Fault

MEGATRON = "gppo_megatron/policy/megatron"
HEAD_CHUNK = f"{MEGATRON}/head_chunk.py"
HEAD, HEAD_TEST = f"{MEGATRON}/head.py", "tests/numeric/test_head.py"
MAIN_GRAD_TEST = "tests/numeric/test_main_grad.py"
LAYOUTS, TABLE, MAPPING_TEST = (
    f"{MEGATRON}/mapping/layouts.py",
    f"{MEGATRON}/mapping/table.py",
    "tests/unit/test_mapping.py",
)
FUSED = "gppo_megatron/data/fused_experts.py"
EXPORT, EXPORT_TEST = f"{MEGATRON}/export.py", "tests/unit/test_export.py"
POLICY_TEST = "tests/numeric/test_policy.py"
LOGITS_TEST = f"{POLICY_TEST}::test_logits_equal_those_of_transformers"
AGGREGATION_TEST = f"{POLICY_TEST}::test_the_gradient_of_every_aggregation"
NOT_FINITE_TEST = "tests/numeric/test_not_finite.py"
ADAMW_TEST = f"{POLICY_TEST}::test_weights_equal_those_of_adamw"
RATES_TEST = f"{POLICY_TEST}::test_learning_rates_follow_their_closed_form"

STATISTICS = (
    Fault(
        "padding-columns-not-masked",
        HEAD,
        "columns = len(weight_VH) - shard.padded_columns(len(weight_VH))",
        "columns = len(weight_VH)",
        HEAD_TEST,
    ),
    Fault(
        "padding-counted-from-the-first-shard",
        HEAD,
        "max(0, self.start + columns - self.vocab)",
        "max(0, columns - self.vocab)",
        HEAD_TEST,
    ),
    Fault(
        "temperature-forgotten",
        HEAD_CHUNK,
        "logits_CV).div_(tile.temperature)",
        "logits_CV)",
        HEAD_TEST,
    ),
    Fault(
        "temperature-forgotten-in-the-gradient",
        HEAD_CHUNK,
        "return gradient_CV.div_(tile.temperature)",
        "return gradient_CV",
        HEAD_TEST,
    ),
    Fault(
        "hidden-rows-changed-in-place",
        HEAD,
        "hidden_gradient_NH = torch.zeros_like(hidden_NH) if wants_hidden else None",
        "hidden_gradient_NH = hidden_NH.detach() if wants_hidden else None",
        HEAD_TEST,
    ),
    Fault(
        "weight-gradient-of-the-last-chunk-alone",
        HEAD,
        "self._sum_VH[columns], keep=True)",
        "self._sum_VH[columns])",
        HEAD_TEST,
    ),
    Fault(
        "rows-of-a-chunk-with-the-first-labels",
        HEAD,
        "scratch.sums(hidden_NH[rows], tile, rows)",
        "scratch.sums(hidden_NH[rows], tile, slice(0, len(hidden_NH[rows])))",
        HEAD_TEST,
    ),
    Fault(
        "entropy-gradient-not-centred",
        HEAD_CHUNK,
        " - of_entropy_C * entropy_C",
        "",
        HEAD_TEST,
    ),
    Fault(
        "entropy-gradient-sign-flipped",
        HEAD_CHUNK,
        "else -given.entropy_C[:, None]",
        "else given.entropy_C[:, None]",
        HEAD_TEST,
    ),
    Fault(
        "entropy-of-the-wrong-normaliser",
        HEAD,
        "log_total_N - sums.weighted / sums.total",
        "log_total_N - sums.weighted",
        HEAD_TEST,
    ),
    Fault(
        "squares-of-the-wrong-normaliser",
        HEAD,
        "sums.squares / sums.total.square()",
        "sums.squares / sums.total",
        HEAD_TEST,
    ),
    Fault(
        "squares-gradient-halved",
        HEAD_CHUNK,
        "addcmul_(probs_CV, 2 * given.squares_C[:, None])",
        "addcmul_(probs_CV, given.squares_C[:, None])",
        HEAD_TEST,
    ),
    Fault(
        "logsumexp-without-its-shift",
        HEAD,
        "return logprobs_N, sums.highest + log_total_N, entropy_N",
        "return logprobs_N, log_total_N, entropy_N",
        HEAD_TEST,
    ),
    Fault(
        "labels-counted-from-the-first-tile",
        HEAD_CHUNK,
        "start=self.start + first",
        "start=self.start",
        HEAD_TEST,
    ),
    Fault(
        "hidden-gradient-of-the-last-tile-alone",
        HEAD,
        "sum_CH, keep=True)",
        "sum_CH)",
        HEAD_TEST,
    ),
    Fault(
        "weight-gradient-in-main-grad-and-in-autograd",
        HEAD,
        "        if not self._in_place:\n            return self._sum_VH.to",
        "        if True:\n            return self._sum_VH.to",
        MAIN_GRAD_TEST,
    ),
    Fault(
        "weight-gradient-summed-in-a-main-grad-of-few-bits",
        HEAD,
        "main_grad_VH is not None and main_grad_VH.dtype == dtype",
        "main_grad_VH is not None and main_grad_VH.is_floating_point()",
        MAIN_GRAD_TEST,
    ),
    Fault(
        "logits-rounded-to-the-weights-bits",
        HEAD_CHUNK,
        "return out_MN.addmm_(first_MK.to(out_MN.dtype), second_KN.to(out_MN.dtype), beta=int(keep))",
        "return out_MN.copy_("
        "torch.addmm(out_MN.to(second_KN.dtype), first_MK.to(second_KN.dtype), second_KN, beta=int(keep)))",
        HEAD_TEST,
    ),
    Fault(
        "widened-weight-not-counted-as-scratch",
        HEAD_CHUNK,
        "return 0 if weight_VH.is_cuda or weight_VH.dtype == dtype else",
        "return 0 if weight_VH.dtype.itemsize > 0 else",
        HEAD_TEST,
    ),
    Fault(
        "label-missing-from-the-gradient",
        HEAD_CHUNK,
        "scatter_add_(1, tile.places(rows)[:, None], of_label_C[:, None])",
        "scatter_add_(1, tile.places(rows)[:, None], 0 * of_label_C[:, None])",
        HEAD_TEST,
    ),
)

DIVERGENCE, DIVERGENCE_TEST = f"{MEGATRON}/divergence.py", "tests/numeric/test_divergence_shards.py"
SCORING, BEHAVIOUR_TEST = f"{MEGATRON}/scoring.py", "tests/numeric/test_behaviour.py"

DISTRIBUTIONS = (
    Fault(
        "logits-of-a-divergence-rounded",
        DIVERGENCE,
        "self.top_logits_N.new_empty(len(hidden_RH), len(weight_BH))",
        "hidden_RH.new_empty(len(hidden_RH), len(weight_BH))",
        DIVERGENCE_TEST,
    ),
    Fault(
        "exact-divergence-the-other-way-round",
        DIVERGENCE,
        "pi.logprobs(rows, columns), mu.logprobs(rows, columns))",
        "mu.logprobs(rows, columns), pi.logprobs(rows, columns))",
        DIVERGENCE_TEST,
    ),
    Fault(
        "last-tile-alone",
        DIVERGENCE,
        "sums_N[rows] += estimators.exact(",
        "sums_N[rows] = estimators.exact(",
        DIVERGENCE_TEST,
    ),
    Fault(
        "padding-counted-as-rest",
        DIVERGENCE,
        "        columns -= self.shard.padded_columns(columns)\n",
        "",
        DIVERGENCE_TEST,
    ),
    Fault(
        "sampled-token-in-the-rest",
        DIVERGENCE,
        'logprobs_RB.scatter_reduce_(1, local_RL, taken_RL, "amin")',
        'logprobs_RB.scatter_reduce_(1, local_RL[:, :-1], taken_RL[:, :-1], "amin")',
        DIVERGENCE_TEST,
    ),
    Fault(
        "tokens-elsewhere-strike-column-zero",
        DIVERGENCE,
        "torch.where(here_RL, -torch.inf, torch.inf)",
        "torch.full_like(logprobs_NL[rows], -torch.inf)",
        DIVERGENCE_TEST,
    ),
    Fault(
        "top-tokens-numbered-within-their-tile",
        DIVERGENCE,
        "found.indices + columns.start + pi.shard.start",
        "found.indices + pi.shard.start",
        DIVERGENCE_TEST,
    ),
    Fault(
        "sampled-token-counted-twice",
        DIVERGENCE,
        "(ids_NK >= 0) & (ids_NK != rows.labels_N[:, None]),",
        "ids_NK >= 0,",
        BEHAVIOUR_TEST,
    ),
    Fault(
        "anchor-head-follows-the-updates",
        SCORING,
        "scored.rows.weight_VH.detach().clone()",
        "scored.rows.weight_VH.detach()",
        BEHAVIOUR_TEST,
    ),
    Fault(
        "anchor-head-of-the-first-rollout",
        SCORING,
        "if self._version != scored.version:",
        "if self._version is None:",
        BEHAVIOUR_TEST,
    ),
    Fault(
        "sampled-rows-taken-for-the-first-ones",
        SCORING,
        "scored.rows.picked_N[some],",
        "scored.rows.picked_N[: len(distribution.hidden_NH)],",
        BEHAVIOUR_TEST,
    ),
    Fault(
        "stale-samples-taken-for-the-policys",
        SCORING,
        "if self.sampled_here and versions not in ([], [version]):",
        "if False:",
        BEHAVIOUR_TEST,
    ),
)

WEIGHTS = (
    Fault(
        "qkv-not-grouped",
        LAYOUTS,
        "grouped = torch.cat([t.reshape(self.kv_heads, -1, *rest) for t in tensors], dim=1)",
        "grouped = torch.cat(list(tensors))",
        MAPPING_TEST,
    ),
    Fault(
        "keys-and-values-swapped",
        TABLE,
        'for part in "qkv")',
        'for part in "qvk")',
        LOGITS_TEST,
    ),
    Fault(
        "gate-and-up-swapped",
        TABLE,
        '(f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")',
        '(f"{theirs}.up_proj.weight", f"{theirs}.gate_proj.weight")',
        LOGITS_TEST,
    ),
    Fault(
        "vocabulary-padding-exported",
        LAYOUTS,
        "(torch.cat(list(parts))[: self.vocab],)",
        "(torch.cat(list(parts)),)",
        MAPPING_TEST,
    ),
    Fault(
        "layers-of-a-stage-counted-from-zero",
        TABLE,
        "{int(number) + first_layer}",
        "{int(number)}",
        MAPPING_TEST,
    ),
    Fault(
        "experts-of-a-rank-counted-from-zero",
        TABLE,
        "int(match['expert']) + first_expert",
        "int(match['expert'])",
        MAPPING_TEST,
    ),
    Fault(
        "experts-cut-as-dense-layers-are",
        TABLE,
        "gate_up, GateUp(), expert)",
        "gate_up, GateUp())",
        MAPPING_TEST,
    ),
    Fault(
        "halves-of-fused-experts-swapped",
        FUSED,
        '{"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}',
        '{"up_proj": slice(0, rows // 2), "gate_proj": slice(rows // 2, rows)}',
        MAPPING_TEST,
    ),
    Fault(
        "first-tensor-of-the-next-bucket-lost",
        EXPORT,
        "                bucket = []\n            bucket.append(planned)",
        "                bucket = []\n                continue\n            bucket.append(planned)",
        EXPORT_TEST,
    ),
    Fault(
        "scales-of-the-block-beside",
        f"{MEGATRON}/block_scaled.py",
        "zip(torch.split(wide, block[0]), scales.float(), strict=True)",
        "zip(torch.split(wide, block[0]), scales.float().roll(1, 0), strict=True)",
        "tests/unit/test_block_scaled.py",
    ),
)

MODEL = (
    Fault(
        "norm-epsilon-of-another-model",
        f"{MEGATRON}/model.py",
        '"layernorm_epsilon": a.norm_eps,',
        '"layernorm_epsilon": 1e-6,',
        LOGITS_TEST,
    ),
    Fault(
        "rope-theta-ignored",
        f"{MEGATRON}/model.py",
        "        rotary_base=architecture.rope_theta,\n",
        "",
        LOGITS_TEST,
    ),
    Fault(
        "llama-3-scaling-ignored",
        f"{MEGATRON}/model.py",
        "divided = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)",
        "divided = frequencies",
        "tests/unit/test_hf_fields.py",
    ),
    Fault(
        "expert-shares-never-normalised",
        f"{MEGATRON}/experts.py",
        '"moe_router_pre_softmax": not experts.normalized,',
        '"moe_router_pre_softmax": True,',
        LOGITS_TEST,
    ),
    Fault(
        "another-activation",
        f"{MEGATRON}/model.py",
        '"activation_func": F.silu,',
        '"activation_func": F.gelu,',
        LOGITS_TEST,
    ),
    Fault(
        "mean-over-micro-batches",
        f"{MEGATRON}/model.py",
        '"calculate_per_token_loss": True,',
        '"calculate_per_token_loss": False,',
        AGGREGATION_TEST,
    ),
    Fault(
        "divided-by-the-token-count-of-megatron",
        f"{MEGATRON}/model.py",
        "finalize_model_grads(model, None, **options)",
        "finalize_model_grads(model, num_tokens, **options)",
        AGGREGATION_TEST,
    ),
    Fault(
        "rows-of-the-grid-mixed",
        f"{MEGATRON}/arrangement.py",
        "torch.arange(length) for length in batch.lengths",
        "torch.arange(length) for length in sorted(batch.lengths)",
        "tests/numeric/test_packed.py",
    ),
    Fault(
        "rows-without-loss-through-the-head",
        f"{MEGATRON}/forward.py",
        "batch.mask_T.nonzero().squeeze(1) if batch.mask_T.any()",
        "torch.arange(len(batch.mask_T)) if batch.mask_T.any()",
        f"{POLICY_TEST}::test_only_rows_with_loss_reach_the_head",
    ),
    Fault(
        "log-probs-at-temperature-one",
        f"{MEGATRON}/forward.py",
        "HeadRows(hidden_MH, weight_VH, labels_M, self.shard, self.temperature, picked_M)",
        "HeadRows(hidden_MH, weight_VH, labels_M, self.shard, 1.0, picked_M)",
        AGGREGATION_TEST,
    ),
)

NOT_FINITE = (
    Fault(
        "schedule-goes-on-over-a-skipped-step",
        f"{MEGATRON}/update.py",
        "        self._skipped_in_a_row += 1\n",
        "        self._skipped_in_a_row += 1\n        self._scheduler.step(increment=1)\n",
        NOT_FINITE_TEST,
    ),
    Fault(
        "version-goes-on-over-a-skipped-step",
        f"{MEGATRON}/update.py",
        "        self._skipped_in_a_row += 1\n",
        "        self._skipped_in_a_row += 1\n        self._version += 1\n",
        NOT_FINITE_TEST,
    ),
    Fault(
        "step-taken-with-a-gradient-that-is-not-finite",
        f"{MEGATRON}/update.py",
        "        self._skipped_in_a_row += 1\n",
        "        self._skipped_in_a_row += 1\n        self._optimizer.step()\n",
        NOT_FINITE_TEST,
    ),
    Fault(
        "skipped-steps-counted-over-the-whole-run",
        f"{MEGATRON}/update.py",
        "        self._version += 1\n        self._skipped_in_a_row = 0\n",
        "        self._version += 1\n",
        NOT_FINITE_TEST,
    ),
    Fault(
        "last-layer-at-fault-named",
        f"{MEGATRON}/not_finite.py",
        "return min((place for",
        "return max((place for",
        NOT_FINITE_TEST,
    ),
)

OPTIMIZER = (
    Fault(
        "gradients-of-the-step-before",
        f"{MEGATRON}/update.py",
        "            chunk.zero_grad_buffer()",
        "            chunk.training",
        ADAMW_TEST,
    ),
    Fault(
        "weight-decay-on-norms",
        f"{MEGATRON}/update.py",
        "        self._scheduler = _scheduler(",
        '        for group in self._optimizer.param_groups:\n            group["wd_mult"] = 1.0\n'
        "        self._scheduler = _scheduler(",
        ADAMW_TEST,
    ),
    Fault(
        "betas-equal",
        f"{MEGATRON}/update.py",
        '"adam_beta2": config.betas[1],',
        '"adam_beta2": config.betas[0],',
        ADAMW_TEST,
    ),
    Fault(
        "clipping-off",
        f"{MEGATRON}/update.py",
        '"clip_grad": config.clip_grad or math.inf,',
        '"clip_grad": math.inf,',
        f"{POLICY_TEST}::test_the_gradient_is_clipped_to_its_norm",
    ),
    Fault(
        "learning-rate-one-step-late",
        f"{MEGATRON}/update.py",
        "    scheduler.step(increment=1)  # ",
        "    scheduler.step(increment=0)  # ",
        RATES_TEST,
    ),
    Fault(
        "decay-one-step-short",
        f"{MEGATRON}/update.py",
        "max(optimizer_steps, config.warmup_steps) + 1",
        "max(optimizer_steps, config.warmup_steps)",
        RATES_TEST,
    ),
)

FAULTS = (*STATISTICS, *DISTRIBUTIONS, *WEIGHTS, *MODEL, *NOT_FINITE, *OPTIMIZER)
