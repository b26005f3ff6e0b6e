"""The anchor's whole distribution, from scoring to the trust region, over several updates of one rollout.

The reference is the Hugging Face model of the weights at the rollout and of those at each update, in float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from gppo_megatron.errors import GppoError
from gppo_megatron.objective.divergences import generator_of
from gppo_megatron.objective.policy_gradient import PolicyGradient, TokenLoss, TokenStreams
from gppo_megatron.objective.presets import Cell
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.divergence import ExactDivergence, HeadDivergence, TopKDivergence, head_divergence
from gppo_megatron.policy.megatron.scoring import AnchorLogprobs, Measurement, OwnRows, OwnTopTokens, measured_of_anchor
from gppo_megatron.policy.megatron.update import MegatronPolicy
from gppo_megatron.types import MicroBatch
from tests.distributed.layouts import TEMPERATURE
from tests.distributed.reference import batch_of, from_folder, random_model
from tests.numeric.test_policy import OPTIMIZER, exported_weights
from tests.single_process import model_of, world_of_one

GENERATOR = generator_of("kl_fwd")
COUNT = 5


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model("qwen3", request.param).save_pretrained(path)
    return path


@dataclass
class Watching:
    """Maximum likelihood's push through a trust region, keeping the streams it saw."""

    region: TrustRegion
    seen: list[TokenStreams] = field(default_factory=list)

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        self.seen.append(streams)
        return PolicyGradient(self.region)(replace(streams, advantages_T=torch.ones_like(streams.advantages_T)))


def log_probs(folder: Path, weights: dict[str, torch.Tensor], micro: MicroBatch) -> torch.Tensor:
    """float64 [N, vocabulary], of the predictions with loss."""
    model = from_folder(folder).double()
    model.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    with torch.no_grad():
        rows = [model(tokens[None]).logits[0] for tokens in torch.split(micro.tokens_T, list(micro.lengths))]
    return torch.log_softmax(torch.cat(rows) / TEMPERATURE, -1)[micro.mask_T]


def whole(log_pi: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    return (log_mu.exp() * (log_mu - log_pi)).sum(1)


def bucketed(log_pi: torch.Tensor, log_mu: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """KL(mu || pi) of {each of mu's top tokens, the label, the rest}."""
    keep = torch.zeros_like(log_mu, dtype=torch.bool)
    keep.scatter_(1, log_mu.topk(COUNT, dim=1).indices, True).scatter_(1, labels[:, None], True)
    pi, mu = log_pi.exp(), log_mu.exp()
    pi_rest, mu_rest = (pi * ~keep).sum(1), (mu * ~keep).sum(1)
    return (mu * (log_mu - log_pi) * keep).sum(1) + mu_rest * (mu_rest / pi_rest).log()


@pytest.mark.parametrize("estimator", ["exact", "topk"])
def test_the_divergence_over_the_updates_of_a_rollout(folder: Path, estimator: str) -> None:
    divergence: HeadDivergence = {"exact": ExactDivergence(GENERATOR), "topk": TopKDivergence(GENERATOR)}[estimator]
    measurements: list[Measurement] = [AnchorLogprobs(), OwnRows(sampled_here=False), OwnTopTokens(COUNT)]
    policy = MegatronPolicy(model_of(folder, TEMPERATURE), OPTIMIZER, 10, divergence=divergence)
    start = exported_weights(policy)
    batch = policy.score(measurements, batch_of(micro_batch_tokens=40))
    assert len(batch.micro_batches) > 2
    watch = Watching(TrustRegion(Cell("kl_fwd", estimator, 9.0, 9.0)))
    for update in range(3):
        weights = exported_weights(policy)
        watch.seen.clear()
        metrics = policy.update(batch, watch).flat()
        largest = 0.0
        for micro, streams in zip(batch.micro_batches, watch.seen, strict=True):
            log_pi, log_mu = log_probs(folder, weights, micro), log_probs(folder, start, micro)
            labels = micro.labels_T[micro.mask_T]
            expected = whole(log_pi, log_mu) if estimator == "exact" else bucketed(log_pi, log_mu, labels)
            assert streams.divergence_T is not None
            assert (streams.divergence_T[micro.mask_T] - expected).abs().max() <= 1e-5 * max(1.0, expected.max().item())
            assert (streams.divergence_T[~micro.mask_T] == 0).all()
            largest = max(largest, expected.max().item())
        assert largest < 1e-9 if update == 0 else largest > 0.05
        assert (metrics["divergence/mean"] > 0.01) == (update > 0)


@pytest.mark.parametrize("count", [3, 1000])
def test_the_exact_divergence_of_a_sample_beside_another_estimator(folder: Path, count: int) -> None:
    """What the sample holds is the divergence of those very tokens, and the log-probs are what they are without it."""
    policy = MegatronPolicy(model_of(folder, TEMPERATURE), OPTIMIZER, 10, exact=ExactDivergence(GENERATOR))
    start = exported_weights(policy)
    batch = policy.score([AnchorLogprobs(), OwnRows(sampled_here=True, count=count)], batch_of(40))
    watch = Watching(TrustRegion(Cell("kl_fwd", "atomic", 9.0, 9.0)))
    policy.update(batch, watch)
    weights = exported_weights(policy)
    watch.seen.clear()
    policy.update(batch, watch)
    places = []
    for micro, streams in zip(batch.micro_batches, watch.seen, strict=True):
        assert streams.divergence_T is None
        assert streams.exact_T is not None
        ours = streams.exact_T[micro.mask_T]
        known = ~ours.isnan()
        assert int(known.sum()) == min(count, len(ours)) == len(micro.past.hidden_NH)
        expected = whole(log_probs(folder, weights, micro), log_probs(folder, start, micro))
        assert (ours - expected)[known].abs().max() <= 1e-5 * max(1.0, expected.max().item())
        assert expected.max() > 0.02
        places.append(known.nonzero().squeeze(1).tolist())
    if count == 3:
        assert any(place != [0, 1, 2] for place in places), "a sample, not the first ones"


def test_the_trust_region_masks_by_the_exact_divergence(folder: Path) -> None:
    """The second update moves on: every token is beyond a small radius, so that none outward is kept."""
    kept = {}
    for delta in (1e-9, 1e9):
        policy = MegatronPolicy(model_of(folder, TEMPERATURE), OPTIMIZER, 10, divergence=ExactDivergence(GENERATOR))
        batch = policy.score([AnchorLogprobs(), OwnRows(sampled_here=False)], batch_of())
        watch = Watching(TrustRegion(Cell("kl_fwd", "exact", delta, delta)))
        policy.update(batch, watch)
        kept[delta] = policy.update(batch, watch).flat()["kept/positive"]
        (moved_T,) = (s.logprobs_T > s.anchor_logprobs_T for s in watch.seen[1:])
        outward = moved_T[batch.micro_batches[0].mask_T].float().mean().item()
    assert kept[1e9] == 1
    assert kept[1e-9] == pytest.approx(1 - outward)
    assert outward > 0.5


def test_the_rows_of_one_version_share_one_head(folder: Path) -> None:
    policy = MegatronPolicy(model_of(folder, TEMPERATURE), OPTIMIZER, 10)
    score = partial(policy.score, [OwnRows(sampled_here=False)])
    batches = [score(batch_of(40)), score(batch_of(40))]
    pasts = [micro.past for batch in batches for micro in batch.micro_batches]
    assert len(pasts) > 4
    assert len({past.weight_VH.data_ptr() for past in pasts}) == 1
    assert all(
        past.hidden_NH.shape == (int(m.mask_T.sum()), 32)
        for past, m in zip(pasts, [*batches[0].micro_batches, *batches[1].micro_batches], strict=True)
    )
    head = pasts[0].weight_VH.clone()
    policy.update(batch_of(), Watching(TrustRegion(Cell("kl_fwd", "atomic", 9.0, 9.0))))
    assert torch.equal(pasts[0].weight_VH, head), "an update must not reach the copy"
    assert not torch.equal(score(batch_of()).micro_batches[0].past.weight_VH, head)


def test_scoring_is_one_forward_pass_and_keeps_the_version(folder: Path) -> None:
    model = model_of(folder, TEMPERATURE)
    passes = []
    model.chunks[0].module.register_forward_pre_hook(lambda *_: passes.append(1))
    policy = MegatronPolicy(model, OPTIMIZER, 10)
    before = exported_weights(policy)
    batch = batch_of(40)
    scored = policy.score([AnchorLogprobs(), OwnTopTokens(3), OwnRows(True)], batch)
    assert len(passes) == len(batch.micro_batches)
    assert policy.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())
    for micro in scored.micro_batches:
        log_mu = log_probs(folder, before, micro)
        assert (
            micro.anchor_logprobs_T[micro.mask_T] - log_mu.gather(1, micro.labels_T[micro.mask_T][:, None])[:, 0]
        ).abs().max() <= 1e-5
        assert micro.top.ids_TK.shape == (len(micro.tokens_T), 3)
        assert torch.equal(micro.top.ids_TK[micro.mask_T].long(), log_mu.topk(3, dim=1).indices)
        assert (micro.top.logprobs_TK[micro.mask_T] - log_mu.topk(3, dim=1).values).abs().max() <= 1e-5


def test_what_another_version_sampled_is_refused(folder: Path) -> None:
    policy = MegatronPolicy(model_of(folder, TEMPERATURE), OPTIMIZER, 10, version=3)
    with pytest.raises(
        GppoError, match=r"version 3, but versions \[0\] sampled these; set objective.anchor: recomputed"
    ):
        policy.score([OwnRows(sampled_here=True)], batch_of())
    policy.score([OwnRows(sampled_here=False)], batch_of())
    with pytest.raises(GppoError, match=r"anchor: recomputed, or diagnostics.exact_sample: 0"):
        policy.score([OwnRows(sampled_here=True, count=2)], batch_of())


@pytest.mark.parametrize(
    ("divergence", "lacks"), [(ExactDivergence(GENERATOR), "rows"), (TopKDivergence(GENERATOR), "top tokens")]
)
def test_a_batch_without_the_anchors_distribution_is_refused(
    folder: Path, divergence: HeadDivergence, lacks: str
) -> None:
    policy = MegatronPolicy(model_of(folder, TEMPERATURE), OPTIMIZER, 10, divergence=divergence)
    with pytest.raises(GppoError, match=lacks):
        policy.update(batch_of(), Watching(TrustRegion(Cell("kl_fwd", "exact", 9.0, 9.0))))


def test_a_micro_batch_without_loss_needs_no_distribution(folder: Path) -> None:
    from gppo_megatron.data.packing import filler

    policy = MegatronPolicy(model_of(folder, TEMPERATURE), OPTIMIZER, 10, divergence=ExactDivergence(GENERATOR))
    batch = batch_of()
    batch = replace(batch, micro_batches=(*batch.micro_batches, filler()))
    scored = policy.score([OwnRows(sampled_here=True), AnchorLogprobs(), OwnTopTokens(2)], batch)
    assert scored.micro_batches[-1].past is None
    watch = Watching(TrustRegion(Cell("kl_fwd", "exact", 9.0, 9.0)))
    policy.update(scored, watch)
    assert watch.seen[-1].divergence_T.tolist() == [0.0]


@pytest.mark.parametrize(
    ("anchor", "estimator", "measured"),
    [
        ("rollout", "atomic", ()),
        ("rollout", "topk", ()),
        ("rollout", "exact", (OwnRows(sampled_here=True),)),
        ("recomputed", "atomic", (AnchorLogprobs(),)),
        ("recomputed", "topk", (AnchorLogprobs(), OwnTopTokens(7))),
        ("recomputed", "exact", (AnchorLogprobs(), OwnRows(sampled_here=False))),
    ],
)
def test_what_is_measured(anchor: str, estimator: str, measured: tuple[Measurement, ...]) -> None:
    found = measured_of_anchor(anchor, estimator, 7)
    assert [type(part) for part in found] == [type(part) for part in measured]
    assert [getattr(part, "sampled_here", None) for part in found] == [
        getattr(part, "sampled_here", None) for part in measured
    ]
    assert [getattr(part, "count", None) for part in found] == [getattr(part, "count", None) for part in measured]
    sampled = measured_of_anchor(anchor, estimator, 7, 5)
    assert [type(part) for part in sampled[: len(found)]] == [type(part) for part in found]
    if estimator != "exact":
        assert [(part.count, part.sampled_here) for part in sampled[len(found) :]] == [(5, anchor == "rollout")]


def test_which_cells_ask_the_head() -> None:
    assert isinstance(head_divergence(Cell("alpha", "exact", 0.1, 0.1, alpha=0.5)), ExactDivergence)
    assert isinstance(head_divergence(Cell("tv", "topk", 0.1, 0.1)), TopKDivergence)
    assert head_divergence(Cell("tv", "binary", 0.1, 0.1)) is None
