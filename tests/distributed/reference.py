"""The same step by transformers, plain autograd and the trust region written out: what the policy is compared with."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.data.fused_experts import one_expert_at_a_time
from gppo_megatron.data.packing import Packer
from gppo_megatron.objective.presets import Aggregation
from gppo_megatron.types import Alone, TrainBatch, Trajectory
from tests.distributed.layouts import LENGTH, OPTIMIZER, STEPS, TEMPERATURE, advantage_of, groups_of, sent

DELTA = 0.025
VOCAB = 37

FAMILIES = {
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
}


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}


class Prediction(NamedTuple):
    """log_pi, log_mu: float32 [n], of the n trained tokens of one sequence, in nats."""

    log_pi: torch.Tensor
    log_mu: torch.Tensor


def random_model(family: str, tied: bool, layers: int = 2) -> torch.nn.Module:
    """8 heads of 8 over a hidden size of 32, 4 key-value heads, 37 tokens; nothing of it is a default.

    Its log-probs are far from uniform, and no norm or bias is 1 or 0.
    """
    config = FAMILIES[family](
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, tie_word_embeddings=tied, sliding_window=None, rms_norm_eps=4e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 777.0}, **(EXPERTS if family == "qwen3_moe" else {}),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix = parameter.ndim > 1
            mean, deviation = (0.0, 0.1) if matrix or name.endswith("bias") else (1.0, 0.1)
            parameter.normal_(mean, deviation, generator=generator)
    return model


def make_sensitive(model: torch.nn.Module, qk_norm: bool) -> None:
    """Scale the weights so that the epsilon of every norm matters and attention is far from uniform."""
    scales = {"embed_tokens": 0.02, "v_proj": 2.0, "o_proj": 0.01, "gate_proj": 3.0, "up_proj": 3.0, "down_proj": 0.003}
    scales |= dict.fromkeys(("q_proj.weight", "k_proj.weight"), 0.006 if qk_norm else 3.0)
    scales |= {
        "q_norm": 1.5,
        "k_norm": 1.5,
        "lm_head": 3.0,
        "model.norm": 300.0 if model.config.tie_word_embeddings else 1,
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(math.prod(scale for part, scale in scales.items() if part in name))


def named(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor each expert, as files name them."""
    parts = [one_expert_at_a_time(name, tensor.detach()) for name, tensor in parameters.items()]
    return {name: tensor for part in parts for name, tensor in part}


def from_folder(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@contextmanager
def routed(model: Any, trajectory: Trajectory) -> Iterator[None]:
    """The trajectory's tokens go where `experts` says, with the router's own probabilities; its choice where it is -1
    or there is none."""

    def instead(layer: int, router: Any, _: Any, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert trajectory.experts is not None
        given = torch.from_numpy(trajectory.experts[:, layer]).long()
        chosen = torch.where(given >= 0, given, outputs[2])
        values = torch.softmax(outputs[0].float(), -1).gather(1, chosen)
        return outputs[0], values / values.sum(-1, keepdim=True) if router.norm_topk_prob else values, chosen

    with ExitStack() as hooks:
        for number, layer in enumerate(model.model.layers):
            if trajectory.experts is not None and hasattr(layer.mlp, "gate"):
                hook = layer.mlp.gate.register_forward_hook(partial(instead, number))
                hooks.callback(hook.remove)
        yield


def predictions(model: torch.nn.Module, trajectory: Trajectory, temperature: float = TEMPERATURE) -> Prediction:
    """With gradient in log_pi."""
    ids = torch.from_numpy(trajectory.token_ids)
    with routed(model, trajectory):
        log_probs = torch.log_softmax(model(ids[None]).logits[0] / temperature, -1)[:-1]
    trained = torch.from_numpy(trajectory.trainable)[1:]
    log_pi = log_probs.gather(1, ids[1:, None]).squeeze(1)
    return Prediction(log_pi[trained], torch.from_numpy(trajectory.sampler_logprobs)[1:][trained])


def trajectories_of(vocab: int, step: int = 0) -> list[Trajectory]:
    """The sequences of `layouts`, one after the other."""
    return [trajectory for group in groups_of(vocab, step) for trajectory in group.trajectories]


def gppo_losses(model: torch.nn.Module, trajectories: Sequence[Trajectory]) -> Iterator[torch.Tensor]:
    """Of each sequence, a loss a trained token: -A r log pi where the trust region keeps it, r without gradient."""
    for trajectory in trajectories:
        log_pi, log_mu = predictions(model, trajectory)
        advantage = advantage_of(trajectory)
        ratio = (log_pi - log_mu).exp().detach()
        outward = (ratio - 1) * advantage > 0
        masked = outward & (log_mu.exp() * (ratio - 1 - ratio.log()) > DELTA)
        yield torch.where(masked, 0.0, -advantage * ratio * log_pi)


def aggregate(losses: Sequence[torch.Tensor], aggregation: Aggregation, length: int | None) -> torch.Tensor:
    """Losses of sequences -> one number."""
    match aggregation:
        case "token_mean":
            return torch.cat(list(losses)).mean()
        case "sequence_mean":
            return torch.stack([loss.mean() for loss in losses]).mean()
        case "constant_length":
            assert length is not None
            return torch.stack([loss.sum() for loss in losses]).mean() / length


def batch_of(
    micro_batch_tokens: int = 4096, aggregation: Aggregation = "token_mean", length: int | None = None
) -> TrainBatch:
    """The batch of `layouts`, packed for a model of `random_model`."""
    groups = groups_of(VOCAB)
    advantages = [[advantage_of(trajectory) for trajectory in group.trajectories] for group in groups]
    (batch,) = Packer(1, micro_batch_tokens, aggregation, length, Alone()).pack(groups, advantages)
    return batch


def hf_gradients(
    folder: Path, aggregation: Aggregation = "token_mean", length: int | None = None
) -> dict[str, torch.Tensor]:
    """d loss / d weight of the batch of `layouts`, by Hugging Face name."""
    model = from_folder(folder)
    losses = list(gppo_losses(model, trajectories_of(model.config.vocab_size)))
    aggregate(losses, aggregation, length).backward()
    return named({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})


class Trained(NamedTuple):
    """A loss and a norm before clipping a step; by name the first step's clipped gradients, the last step's weights."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def hf_training(folder: Path, aggregation: Aggregation, replay: bool = False) -> Trained:
    """The steps of `layouts` with torch's own AdamW and clipping."""
    model = from_folder(folder)
    architecture = read_architecture(folder)
    parameters = dict(model.named_parameters())
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    others = [parameter for parameter in parameters.values() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    trained = Trained([], [], {}, {})
    for step in range(STEPS):
        optimizer.zero_grad()
        trajectories = trajectories_of(model.config.vocab_size, step)
        if replay:
            trajectories = [sent(trajectory, architecture) for trajectory in trajectories]
        losses = list(gppo_losses(model, trajectories))
        loss = aggregate(losses, aggregation, LENGTH)
        loss.backward()
        trained.losses.append(float(loss.detach()))
        trained.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), OPTIMIZER.clip_grad)))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
            trained.gradients.update(named(gradients))
        optimizer.step()
    trained.weights.update(named(parameters))
    return trained


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference over the reference's largest absolute value."""
    return float((value - reference).abs().max() / reference.abs().max())


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert set(ours) == set(theirs)
    distances = {name: relative(ours[name], tensor) for name, tensor in theirs.items()}
    worst = max(distances, key=distances.__getitem__)
    assert distances[worst] <= tolerance, (worst, distances[worst])
