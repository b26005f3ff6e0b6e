"""Faults in how sequences are packed, cut over processes and balanced."""

from tests.mutants.fault import Fault

MEGATRON = "gppo_megatron/policy/megatron"
ATTENTION, ARRANGEMENT = f"{MEGATRON}/attention.py", f"{MEGATRON}/arrangement.py"
BALANCE, BALANCE_TEST = "gppo_megatron/data/balance.py", "tests/unit/test_balance.py"
PACKING, PACKING_TEST = "gppo_megatron/data/packing.py", "tests/unit/test_packing.py"
PACKED_TEST = "tests/numeric/test_packed.py"
ROUTING, ROUTING_TEST = f"{MEGATRON}/routing.py", "tests/numeric/test_routing.py"
FLOPS, FLOPS_TEST = "gppo_megatron/config/flops.py", "tests/numeric/test_flops.py"
RECOMPUTE_TEST = "tests/numeric/test_policy.py::test_recomputing_runs_layers_again_and_changes_no_gradient"

FAULTS = (
    Fault(
        "packed-sequences-see-one-another",
        ATTENTION,
        "lengths = _lengths(packed_seq_params.cu_seqlens_q) if packed else [len(query) * context]",
        "lengths = [len(query) * context]",
        PACKED_TEST,
    ),
    Fault("packed-attention-looks-ahead", ATTENTION, "causal=True", "causal=False", PACKED_TEST),
    Fault(
        "context-slices-of-the-first-sequence-alone",
        ATTENTION,
        "starts = [sum(lengths[:index]) for index in range(len(lengths))]",
        "starts = [0 for _ in lengths]",
        PACKED_TEST,
    ),
    Fault(
        "tokens-at-places-without-padding",
        ARRANGEMENT,
        "zip(_starts(padded), batch.lengths, strict=True)",
        "zip(_starts(batch.lengths), batch.lengths, strict=True)",
        PACKED_TEST,
    ),
    Fault(
        "positions-run-on-over-sequences",
        ARRANGEMENT,
        "positions = torch.cat([torch.arange(length) for length in padded])",
        "positions = torch.arange(sum(padded))",
        PACKED_TEST,
    ),
    Fault(
        "rows-and-columns-swapped",
        ARRANGEMENT,
        "row_T * columns + column_T",
        "column_T * length + row_T",
        PACKED_TEST,
    ),
    Fault("attention-costs-nothing", BALANCE, "length * (self.linear + length)", "length * self.linear", BALANCE_TEST),
    Fault(
        "budget-ignored-when-spreading",
        BALANCE,
        "fitting = [part for part in bins if _fits(part, index, lengths, room, budget)]",
        "fitting = bins",
        BALANCE_TEST,
    ),
    Fault(
        "exchanged-sequences-kept-too",
        PACKING,
        "items[place.item] if place.rank == team.rank else sent[place.rank][place.item]",
        "items[place.item % len(items)]",
        PACKING_TEST,
    ),
    Fault(
        "micro-batches-not-in-rounds",
        PACKING,
        "/ self.multiple) * self.multiple",
        "/ 1)",
        PACKING_TEST,
    ),
    Fault(
        "recompute-forgotten",
        f"{MEGATRON}/model.py",
        "ours |= FIXED | _layout_fields(parallel) | _recompute_fields(memory)",
        "ours |= FIXED | _layout_fields(parallel)",
        RECOMPUTE_TEST,
    ),
    Fault(
        "replayed-experts-of-the-next-token",
        ROUTING,
        "place, chosen = grid.place_T[here_T], chosen_TLK[here_T].long()",
        "place, chosen = grid.place_T[here_T], chosen_TLK[here_T].long().roll(-1, 0)",
        ROUTING_TEST,
    ),
    Fault(
        "recomputed-layers-choose-anew",
        ROUTING,
        "replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)",
        "replay.clear_router_replay_action()",
        ROUTING_TEST,
    ),
    Fault(
        "experts-reported-one-token-late",
        "gppo_megatron/rollout/routed.py",
        "(self._longest + step - 1, self._longest + step)",
        "(self._longest + step, self._longest + step + 1)",
        ROUTING_TEST,
    ),
    Fault("every-expert-costs", FLOPS, "experts.per_token * 3", "experts.count * 3", FLOPS_TEST),
    Fault("attention-to-all-keys-counted", FLOPS, "length * (length + 1) // 2", "length * length", FLOPS_TEST),
)
