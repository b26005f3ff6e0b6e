"""Faults in the Megatron policy: its head, its weights, its model, its optimizer."""

from tests.mutants.fault import Fault

MEGATRON = "gppo_megatron/policy/megatron"
HEAD, HEAD_TEST = f"{MEGATRON}/head.py", "tests/numeric/test_head.py"
LAYOUTS, TABLE, MAPPING_TEST = (
    f"{MEGATRON}/mapping/layouts.py",
    f"{MEGATRON}/mapping/table.py",
    "tests/unit/test_mapping.py",
)
POLICY_TEST = "tests/numeric/test_policy.py"
LOGITS_TEST = f"{POLICY_TEST}::test_logits_equal_those_of_transformers"
AGGREGATION_TEST = f"{POLICY_TEST}::test_the_gradient_of_every_aggregation"
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
        HEAD,
        ".div_(self.temperature)",
        "",
        HEAD_TEST,
    ),
    Fault(
        "temperature-forgotten-in-the-gradient",
        HEAD,
        "gradient_CV.div_(ctx.temperature)",
        "gradient_CV.div_(1)",
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
        ".addmm_(gradient_CV.t(), hidden_CH)",
        ".addmm_(gradient_CV.t(), hidden_CH, beta=0)",
        HEAD_TEST,
    ),
    Fault(
        "rows-of-a-chunk-with-the-first-labels",
        HEAD,
        "gather(1, columns.local_N[rows, None])",
        "gather(1, columns.local_N[: len(logits_CV), None])",
        HEAD_TEST,
    ),
    Fault(
        "entropy-gradient-not-centred",
        HEAD,
        " - of_entropy_N * entropy_N",
        "",
        HEAD_TEST,
    ),
    Fault(
        "entropy-gradient-sign-flipped",
        HEAD,
        "else -self.entropy_N[rows, None]",
        "else self.entropy_N[rows, None]",
        HEAD_TEST,
    ),
    Fault(
        "entropy-of-the-wrong-normaliser",
        HEAD,
        "log_total_N - weighted_N / total_N",
        "log_total_N - weighted_N",
        HEAD_TEST,
    ),
    Fault(
        "squares-of-the-wrong-normaliser",
        HEAD,
        "squares_N / total_N.square()",
        "squares_N / total_N",
        HEAD_TEST,
    ),
    Fault(
        "squares-gradient-halved",
        HEAD,
        "addcmul_(probs_CV, 2 * self.squares_N[rows, None])",
        "addcmul_(probs_CV, self.squares_N[rows, None])",
        HEAD_TEST,
    ),
    Fault(
        "logsumexp-without-its-shift",
        HEAD,
        "label_N - log_total_N, top_N + log_total_N, entropy_N",
        "label_N - log_total_N, log_total_N, entropy_N",
        HEAD_TEST,
    ),
    Fault(
        "label-missing-from-the-gradient",
        HEAD,
        "scatter_add_(1, columns.local_N[rows, None], label_gradient_C[:, None])",
        "scatter_add_(1, columns.local_N[rows, None], 0 * label_gradient_C[:, None])",
        HEAD_TEST,
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
        '(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")',
        '(f"{mlp}.up_proj.weight", f"{mlp}.gate_proj.weight")',
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
        f"{MEGATRON}/forward.py",
        "torch.arange(length) for length in batch.lengths",
        "torch.arange(length) for length in sorted(batch.lengths)",
        AGGREGATION_TEST,
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
        "token_statistics(hidden_NH, weight_VH, labels_N, self.shard, self.temperature)",
        "token_statistics(hidden_NH, weight_VH, labels_N, self.shard, 1.0)",
        AGGREGATION_TEST,
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
        "adam_beta2=config.betas[1],",
        "adam_beta2=config.betas[0],",
        ADAMW_TEST,
    ),
    Fault(
        "clipping-off",
        f"{MEGATRON}/update.py",
        "clip_grad=config.clip_grad or math.inf,",
        "clip_grad=math.inf,",
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

FAULTS = (*STATISTICS, *WEIGHTS, *MODEL, *OPTIMIZER)
