"""Divergences between whole distributions of the next token, from vocabulary shards and without all logits.

A divergence only decides which tokens train, so nothing here has a gradient. Log-probabilities are worked out tile by
tile, R rows by B columns of this rank's shard, and dropped. N: rows, H: hidden size, V: columns of the shard, K: top
tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from gppo_megatron.errors import GppoError
from gppo_megatron.objective import estimators
from gppo_megatron.objective.divergences import Generator, generator_of
from gppo_megatron.objective.presets import Cell
from gppo_megatron.policy.megatron import head
from gppo_megatron.policy.megatron.head import TokenStatistics, VocabShard
from gppo_megatron.policy.megatron.head_chunk import product, widened_bytes
from gppo_megatron.types import MicroBatch

TILE_ROWS = 1024
TILE_BUFFERS = 12
"""How many float32 tiles may live at once: two distributions, and what a generator makes of them."""


class Tile(NamedTuple):
    """Rows and columns of the shard that are worked on together; neither count is above that of the whole."""

    rows: int
    columns: int


@dataclass(frozen=True)
class HeadRows:
    """Rows before the head and this rank's shard of its weight, and how logits become log-probabilities.

    hidden_NH: equal on all ranks of the group. picked_N: int64, on the CPU; which of a micro-batch's T tokens they are.
    Under context parallelism they are those of this process alone.
    """

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    labels_N: torch.Tensor
    shard: VocabShard
    temperature: float
    picked_N: torch.Tensor

    def distribution(self, statistics: TokenStatistics) -> "Distribution":
        """Of the rows whose `statistics` these are."""
        return Distribution(
            self.hidden_NH.detach(),
            self.weight_VH.detach(),
            statistics.top_logits_N,
            statistics.top_logprobs_N,
            self.shard,
            self.temperature,
        )


@dataclass(frozen=True)
class Distribution:
    """A distribution a row, of which any tile can be worked out; `head.TokenStatistics` says what normalises it."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    top_logits_N: torch.Tensor
    top_logprobs_N: torch.Tensor
    shard: VocabShard
    temperature: float

    def at(self, some: slice | torch.Tensor) -> "Distribution":
        """Of some of the rows. A tensor holds their numbers, int64, on the CPU."""
        some = some.to(self.hidden_NH.device) if isinstance(some, torch.Tensor) else some
        return replace(
            self,
            hidden_NH=self.hidden_NH[some],
            top_logits_N=self.top_logits_N[some],
            top_logprobs_N=self.top_logprobs_N[some],
        )

    def tiles(self, tile: Tile | None) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of every tile, padding left out; by default of a size that fits `head.SCRATCH_BYTES`."""
        rows, columns = len(self.hidden_NH), len(self.weight_VH)
        columns -= self.shard.padded_columns(columns)
        if tile is None:
            height = max(1, min(rows, TILE_ROWS))
            column_bytes = 4 * TILE_BUFFERS * height + widened_bytes(self.weight_VH)
            tile = Tile(height, max(1, head.SCRATCH_BYTES // column_bytes))
        for row in range(0, rows, tile.rows):
            for column in range(0, columns, tile.columns):
                yield slice(row, row + tile.rows), slice(column, min(column + tile.columns, columns))

    def logprobs(self, rows: slice, columns: slice) -> torch.Tensor:
        """[R, B], in a new tensor."""
        hidden_RH, weight_BH = self.hidden_NH[rows], self.weight_VH[columns]
        # As the head's own: what normalises the logits was made of the same ones.
        logits_RB = product(hidden_RH, weight_BH.t(), self.top_logits_N.new_empty(len(hidden_RH), len(weight_BH)))
        return (
            logits_RB.div_(self.temperature).sub_(self.top_logits_N[rows, None]).add_(self.top_logprobs_N[rows, None])
        )


@torch.no_grad()
def exact_divergence(
    generator: Generator, pi: Distribution, mu: Distribution, tile: Tile | None = None
) -> torch.Tensor:
    """Collective, one all-reduce: [N], the sum over the vocabulary of mu f(pi / mu)."""
    sums_N = torch.zeros_like(pi.top_logits_N)
    for rows, columns in pi.tiles(tile):
        sums_N[rows] += estimators.exact(generator, pi.logprobs(rows, columns), mu.logprobs(rows, columns))
    return pi.shard.sum(sums_N)


class Picked(NamedTuple):
    """logprobs_NK: of the tokens asked for; rest_N: log of what all others have together, -inf where there are none."""

    logprobs_NK: torch.Tensor
    rest_N: torch.Tensor


@torch.no_grad()
def pick(pi: Distribution, ids_NK: torch.Tensor, labels_N: torch.Tensor, tile: Tile | None = None) -> Picked:
    """Collective, an all-reduce and an all-gather: log-probs of K tokens a row, and of all but them and the label.

    ids_NK: int64, distinct tokens in each row, or -1: its log-probability is 0, and it is no token.
    """
    tokens_NL = torch.cat([ids_NK, labels_N[:, None]], dim=1) - pi.shard.start
    logprobs_NL = torch.zeros_like(tokens_NL, dtype=pi.top_logits_N.dtype)
    rest_N = torch.full_like(pi.top_logits_N, -torch.inf)
    for rows, columns in pi.tiles(tile):
        logprobs_RB = pi.logprobs(rows, columns)
        local_RL = tokens_NL[rows] - columns.start
        here_RL = (local_RL >= 0) & (local_RL < logprobs_RB.shape[1])
        local_RL = torch.where(here_RL, local_RL, 0)
        logprobs_NL[rows] += torch.where(here_RL, logprobs_RB.gather(1, local_RL), 0.0)
        # The minimum, because tokens that are elsewhere all point at column 0 and must not change it.
        taken_RL = torch.where(here_RL, -torch.inf, torch.inf).to(logprobs_RB.dtype)
        logprobs_RB.scatter_reduce_(1, local_RL, taken_RL, "amin")
        rest_N[rows] = torch.logaddexp(rest_N[rows], logprobs_RB.logsumexp(1))
    logprobs_NK = pi.shard.sum(logprobs_NL[:, :-1].contiguous())
    return Picked(logprobs_NK, pi.shard.gather(rest_N).logsumexp(0))


@torch.no_grad()
def top_tokens(pi: Distribution, count: int, tile: Tile | None = None) -> torch.Tensor:
    """Collective, one all-gather: int64 [N, count], each row's likeliest tokens; -1 beyond the vocabulary."""
    rows_in_all = len(pi.hidden_NH)
    best_NK = pi.top_logits_N.new_full((rows_in_all, count), -torch.inf)
    ids_NK = torch.full((rows_in_all, count), -1, dtype=torch.int64, device=best_NK.device)
    for rows, columns in pi.tiles(tile):
        logprobs_RB = pi.logprobs(rows, columns)
        found = logprobs_RB.topk(min(count, logprobs_RB.shape[1]))
        ids_RK = found.indices + columns.start + pi.shard.start
        best_NK[rows], ids_NK[rows] = _best(
            torch.cat([best_NK[rows], found.values], 1), torch.cat([ids_NK[rows], ids_RK], 1), count
        )
    # One exchange for both: float64 holds every id exactly.
    both = pi.shard.gather(torch.stack([best_NK.double(), ids_NK.double()]))
    best_PNK, ids_PNK = both.unbind(1)
    return _best(torch.cat(list(best_PNK), 1), torch.cat(list(ids_PNK), 1), count)[1].long()


def _best(values_NC: torch.Tensor, ids_NC: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    best = values_NC.topk(count)
    return best.values, ids_NC.gather(1, best.indices)


class HeadDivergence(Protocol):
    """An estimator of the divergence that needs more than the sampled token's two log-probabilities."""

    def __call__(self, rows: HeadRows, statistics: TokenStatistics, batch: MicroBatch) -> torch.Tensor:
        """Collective over the tensor-parallel group: [N], one a row of `batch`, without gradient; NaN where the batch
        has nothing to compare a row with.

        Raises GppoError where the batch lacks what the estimator reads.
        """
        ...


@dataclass(frozen=True)
class TopKDivergence:
    """`estimators.top_k`, of the batch's `top` tokens."""

    generator: Generator

    def __call__(self, rows: HeadRows, statistics: TokenStatistics, batch: MicroBatch) -> torch.Tensor:
        if batch.top is None:
            raise GppoError("the estimator 'topk' needs the sampler's top tokens, but this micro-batch has none")
        device, picked_N = rows.hidden_NH.device, rows.picked_N
        ids_NK = batch.top.ids_TK[picked_N].to(device, torch.int64)
        pi = pick(rows.distribution(statistics), ids_NK, rows.labels_N)
        return estimators.top_k(
            self.generator,
            statistics.logprobs_N.detach(),
            batch.anchor_logprobs_T[picked_N].to(device),
            pi.logprobs_NK,
            batch.top.logprobs_TK[picked_N].to(device),
            (ids_NK >= 0) & (ids_NK != rows.labels_N[:, None]),
            pi.rest_N,
            batch.top.rest_T[picked_N].to(device),
        )


@dataclass(frozen=True)
class ExactDivergence:
    """The divergence itself, between the policy and the one whose `past` rows the batch holds: of those rows."""

    generator: Generator

    def __call__(self, rows: HeadRows, statistics: TokenStatistics, batch: MicroBatch) -> torch.Tensor:
        if batch.past is None:
            raise GppoError("the estimator 'exact' needs the anchor policy's rows, but this micro-batch has none")
        past, device = batch.past, rows.hidden_NH.device
        known_N = torch.isin(rows.picked_N, past.picked_N)
        # All of them need no copy.
        some = slice(None) if known_N.all() else known_N.nonzero().squeeze(1)
        mu = Distribution(
            past.hidden_NH.to(device),
            past.weight_VH,
            past.top_logits_N.to(device),
            past.top_logprobs_N.to(device),
            rows.shard,
            rows.temperature,
        )
        divergence_K = exact_divergence(self.generator, rows.distribution(statistics).at(some), mu)
        if isinstance(some, slice):
            return divergence_K
        return torch.full_like(statistics.top_logits_N, torch.nan).index_copy_(0, some.to(device), divergence_K)


HEAD_DIVERGENCES: dict[str, type[TopKDivergence] | type[ExactDivergence]] = {
    "topk": TopKDivergence,
    "exact": ExactDivergence,
}


def head_divergence(cell: Cell) -> HeadDivergence | None:
    """What the head works out for a trust region: nothing for most."""
    if not cell.from_head:
        return None
    return HEAD_DIVERGENCES[cell.estimator](generator_of(cell.divergence, cell.alpha))
