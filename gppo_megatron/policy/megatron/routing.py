"""Which experts a micro-batch's tokens go to: those each router chooses, or those the sampler chose, replayed.

Letters: T tokens of the micro-batch, P places of this process's grid, L layers, K experts a token.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from gppo_megatron.config.architecture import Experts
from gppo_megatron.errors import GppoError
from gppo_megatron.policy.megatron.arrangement import ELSEWHERE, Grid, Shares
from gppo_megatron.types import MicroBatch


class Routing(Protocol):
    def during(self, batch: MicroBatch, grid: Grid, chunk: Any) -> AbstractContextManager[None]:
        """Around the forward pass of `batch` through one part of the model."""
        ...

    def end(self, chunks: Sequence[Any]) -> None:
        """After the last micro-batch of an optimizer step or a scoring."""
        ...


class OwnRouting:
    """Every router chooses."""

    def during(self, batch: MicroBatch, grid: Grid, chunk: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self, chunks: Sequence[Any]) -> None:
        pass


@dataclass(frozen=True)
class ReplayedRouting:
    """Every router sends a token where the sampler sent it, with its own probabilities of these experts: the gradient
    goes through them.

    Megatron's own replay does it: a router is told the experts before its micro-batch's forward pass, and keeps them
    in a queue from which recomputation, which meets the micro-batches in the same order, takes them.

    layers: of the whole model. recomputes: whether layers are computed again in backward passes.
    """

    shares: Shares
    tensor_rank: int
    layers: int
    experts: Experts
    recomputes: bool

    @contextmanager
    def during(self, batch: MicroBatch, grid: Grid, chunk: Any) -> Iterator[None]:
        """Raises GppoError where the sampler did not say, or named an expert that the model does not have."""
        replays = list(_replays(chunk))
        layers = [layer for layer, _ in replays]
        chosen_PLK = self.placed(batch, grid)[:, layers].to(next(chunk.parameters()).device)
        for place, (_, replay) in enumerate(replays):
            replay.set_target_indices(chosen_PLK[:, place])
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for _, replay in replays:
            # A router that runs outside the forward pass is being recomputed.
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            if not self.recomputes:
                replay.clear_indices()

    def end(self, chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            for _, replay in _replays(chunk):
                replay.clear_indices()
                replay.clear_router_replay_action()

    def placed(self, batch: MicroBatch, grid: Grid) -> torch.Tensor:
        """int64 [P, L, K], of the places that this process's routers see, on the CPU.

        Padding, and tokens that the sampler never read, carry no loss; they are dealt out evenly.
        """
        places, per_token = grid.tokens_BS.numel(), self.experts.per_token
        filling_PK = torch.arange(places)[:, None] * per_token + torch.arange(per_token)
        placed_PLK = (filling_PK % self.experts.count)[:, None].repeat(1, self.layers, 1)
        chosen_TLK = self._checked(batch)
        if chosen_TLK is not None:
            here_T = grid.place_T != ELSEWHERE
            place, chosen = grid.place_T[here_T], chosen_TLK[here_T].long()
            placed_PLK[place] = torch.where((chosen >= 0).all(dim=2, keepdim=True), chosen, placed_PLK[place])
        share = places // self.shares.tensor
        return placed_PLK[self.tensor_rank * share : (self.tensor_rank + 1) * share]

    def _checked(self, batch: MicroBatch) -> torch.Tensor | None:
        chosen_TLK = batch.experts_TLK
        if chosen_TLK is None and batch.mask_T.any():
            raise GppoError("objective.routing: replayed needs the sampler's experts of every token; it gave none")
        if chosen_TLK is None:
            return None
        _, layers, per_token = chosen_TLK.shape
        highest = int(chosen_TLK.max())
        if (layers, per_token) != (self.layers, self.experts.per_token) or highest >= self.experts.count:
            raise GppoError(
                f"the sampler sends tokens to {per_token} experts, the highest number {highest}, in {layers} layers, "
                f"but the policy to {self.experts.per_token} of {self.experts.count} in {self.layers}: "
                "these are two models"
            )
        return chosen_TLK


def replayed(chunks: Sequence[Any], layers: int, experts: Experts, shares: Shares) -> ReplayedRouting:
    """For a model whose configuration says `moe_enable_routing_replay`. layers: of the whole model."""
    config = chunks[0].config
    recomputes = config.recompute_granularity is not None or bool(config.moe_layer_recompute)
    rank = parallel_state.get_tensor_model_parallel_rank() if shares.tensor > 1 else 0
    return ReplayedRouting(shares, rank, layers, experts, recomputes)


def _replays(chunk: Any) -> Iterator[tuple[int, RouterReplay]]:
    """Of each layer with experts in this part of the model: its number in the whole model, from 0, and its replay."""
    for layer in chunk.module.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield layer.layer_number - 1, router.router_replay
