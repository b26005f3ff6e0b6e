"""Faults between prompt and micro-batch: data, sampling, rewards, packing."""

from tests.mutants.fault import Fault

PACKING, PACKING_TEST = "gppo_megatron/data/packing.py", "tests/unit/test_packing.py"
EMBEDDED, EMBEDDED_TEST = "gppo_megatron/rollout/embedded.py", "tests/unit/test_embedded.py"
COLLECT, COLLECT_TEST = "gppo_megatron/rollout/collect.py", "tests/unit/test_collect.py"
TYPES = "gppo_megatron/types.py"
PROMPTS_TEST = "tests/unit/test_prompts.py"

PACKED = (
    Fault(
        "denominators-of-one-rank",
        PACKING,
        "tokens, sequences = sum(count[0] for count in counts), sum(count[1] for count in counts)",
        "tokens, sequences = tokens_here, len(items)",
        PACKING_TEST,
    ),
    Fault(
        "labels-not-shifted",
        PACKING,
        "labels_T=_joined([item.trajectory.token_ids for item in items])",
        "labels_T=torch.from_numpy(np.concatenate([item.trajectory.token_ids for item in items]))",
        PACKING_TEST,
    ),
    Fault(
        "mask-not-shifted",
        PACKING,
        "mask_T = _joined([item.trajectory.trainable for item in items])",
        "mask_T = torch.from_numpy(np.concatenate([item.trajectory.trainable for item in items]))",
        PACKING_TEST,
    ),
    Fault(
        "everything-shifted-by-two",
        PACKING,
        "(values[1:], np.zeros_like(values[:1]))",
        "(values[2:], np.zeros_like(values[:2]))",
        PACKING_TEST,
    ),
    Fault(
        "sampler-log-probs-not-shifted",
        PACKING,
        "_joined([item.trajectory.sampler_logprobs for item in items])",
        "torch.from_numpy(np.concatenate([item.trajectory.sampler_logprobs for item in items]))",
        PACKING_TEST,
    ),
    Fault(
        "advantages-of-other-sequences",
        PACKING,
        "torch.tensor([item.advantage for item in items], dtype=torch.float32)",
        "torch.tensor([item.advantage for item in items[::-1]], dtype=torch.float32)",
        PACKING_TEST,
    ),
    Fault(
        "failed-verdict-moves-the-cuts",
        PACKING,
        "flat = [pair for group in pairs for pair in group]",
        "flat = [pair for group in pairs for pair in group if pair[1] is not None]",
        PACKING_TEST,
    ),
)

SAMPLED = (
    Fault(
        "top-tokens-without-temperature",
        "gppo_megatron/rollout/likeliest.py",
        "torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)",
        "torch.log_softmax(logits.float(), dim=-1)",
        "tests/contract/test_engine.py",
    ),
    Fault(
        "sampled-log-prob-without-temperature",
        EMBEDDED,
        "return Drawn(token_ids[:, 0], logprobs.gather(1, token_ids)[:, 0])",
        "return Drawn(token_ids[:, 0], torch.log_softmax(logits.float(), dim=-1).gather(1, token_ids)[:, 0])",
        EMBEDDED_TEST,
    ),
    Fault(
        "sampling-without-temperature",
        EMBEDDED,
        "torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)",
        "torch.log_softmax(logits.float(), dim=-1)",
        EMBEDDED_TEST,
    ),
    Fault(
        "positions-jump-over-left-padding",
        EMBEDDED,
        "self.positions = self.positions[:, -1:] + 1",
        "self.positions = torch.full_like(self.positions[:, -1:], self.mask.shape[1] - 1)",
        EMBEDDED_TEST,
    ),
    Fault(
        "left-padding-attended",
        EMBEDDED,
        "mask=mask.to(device),",
        "mask=torch.ones_like(mask).to(device),",
        EMBEDDED_TEST,
    ),
    Fault(
        "positions-stand-still",
        EMBEDDED,
        "self.positions = self.positions[:, -1:] + 1",
        "self.positions = self.positions[:, -1:]",
        EMBEDDED_TEST,
    ),
    Fault(
        "prompt-tokens-trained",
        COLLECT,
        "trainable=np.arange(before + sampled) >= before,",
        "trainable=np.arange(before + sampled) >= min(1, before),",
        COLLECT_TEST,
    ),
    Fault(
        "members-share-random-numbers",
        COLLECT,
        'f"{seed}/{step}/{place}/{index}/{prompt_id}"',
        'f"{seed}/{step}/{place}/{prompt_id}"',
        COLLECT_TEST,
    ),
    Fault(
        "ranks-share-their-prompts",
        TYPES,
        "range(count * team.rank // team.size, count * (team.rank + 1) // team.size)",
        "range(0, count * (team.rank + 1) // team.size)",
        COLLECT_TEST,
    ),
)

JUDGED = (
    Fault(
        "failed-verdict-counted-as-zero",
        TYPES,
        "None if (score := trajectory.verdict.score) is None else score - trajectory.penalty",
        "(trajectory.verdict.score or 0.0) - trajectory.penalty",
        COLLECT_TEST,
    ),
    Fault(
        "reward-threshold-dropped",
        "verifiers/gppo_verifiers/reasoning.py",
        'Verdict(float(score >= payload["threshold"] - ROUNDING), Status.GRADED)',
        "Verdict(min(1.0, score), Status.GRADED)",
        "tests/unit/test_reasoning.py",
    ),
)

DRAWN = (
    Fault(
        "reshuffle-skipped",
        "gppo_megatron/data/prompts.py",
        "np.array([self._seed, epoch], dtype=np.uint64)",
        "np.array([self._seed, 0], dtype=np.uint64)",
        PROMPTS_TEST,
    ),
    Fault(
        "held-out-problems-trained",
        "gppo_megatron/data/reasoning_gym.py",
        "train = [problem for problem in problems if not is_held_out(problem.text, config.holdout)]",
        "train = list(problems)",
        PROMPTS_TEST,
    ),
    Fault(
        "split-by-place-not-text",
        "gppo_megatron/data/reasoning_gym.py",
        "heldout = [problem for problem in problems if is_held_out(problem.text, config.holdout)]",
        "heldout = problems[: round(config.holdout * len(problems))]",
        PROMPTS_TEST,
    ),
)

STEPPED = (
    Fault(
        "anchor-recomputed-between-updates",
        "gppo_megatron/train.py",
        "batches = [scorer(batch) for batch in batches]",
        "batches = (scorer(batch) for batch in batches)",
        "tests/unit/test_train.py",
    ),
    Fault(
        "means-averaged-without-weights",
        "gppo_megatron/metrics.py",
        "Mean(self.total + other.total, self.weight + other.weight)",
        "Mean(self.value + other.value, 2.0)",
        "tests/unit/test_metrics.py",
    ),
)

PREFETCH_TEST, FILTERS, FILTERS_TEST = (
    "tests/unit/test_prefetch.py", "gppo_megatron/rollout/filters.py", "tests/unit/test_filters.py",
)  # fmt: skip

AHEAD = (
    Fault(
        "tokens-older-than-the-bound-trained",
        "gppo_megatron/rollout/prefetch.py",
        "if version - oldest > self._pace.bound]",
        "if version - oldest > self._pace.bound + 1]",
        PREFETCH_TEST,
    ),
    Fault(
        "stragglers-not-waited-for",
        "gppo_megatron/rollout/prefetch.py",
        "<= self._pace.over_sampling",
        "<= self._pace.over_sampling + 1",
        PREFETCH_TEST,
    ),
    Fault(
        "lost-prompts-not-noticed",
        "gppo_megatron/rollout/tickets.py",
        "if missing or held_flying != sorted(self.flying) or held_ready != sorted(self.ready):",
        "if missing > 0:",
        PREFETCH_TEST,
    ),
    Fault(
        "groups-dealt-by-where-they-were-sampled",
        "gppo_megatron/rollout/buffer.py",
        "consumer = {number: place % data.size for place, number in enumerate(places)}",
        "consumer = {number: number % data.size for number in places}",
        PREFETCH_TEST,
    ),
    Fault(
        "newer-weights-refused-while-they-are-published",
        "gppo_megatron/rollout/fleet.py",
        "response.oldest <= v <= self._newest",
        "response.oldest <= v <= self._version",
        "tests/unit/test_fleet.py",
    ),
    Fault(
        "over-long-penalty-of-the-whole-length",
        FILTERS,
        "max(0, beyond) / self.buffer",
        "max(0, beyond) / self.longest",
        FILTERS_TEST,
    ),
    Fault(
        "finished-answers-masked",
        FILTERS,
        'if trajectory.finish != "length":',
        'if trajectory.finish == "length":',
        FILTERS_TEST,
    ),
)

FAULTS = (*PACKED, *SAMPLED, *JUDGED, *DRAWN, *STEPPED, *AHEAD)
