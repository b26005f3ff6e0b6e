"""The same step by transformers, plain autograd and the trust region written out: what the policy is compared with."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from gppo_megatron.data.packing import Packer
from gppo_megatron.objective.presets import Aggregation
from gppo_megatron.types import Alone, TrainBatch, Trajectory
from tests.distributed.layouts import TEMPERATURE, advantage_of, groups_of

DELTA = 0.025
VOCAB = 37

FAMILIES = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
}


class Prediction(NamedTuple):
    """log_pi, log_mu: float32 [n], of the n trained tokens of one sequence, in nats."""

    log_pi: torch.Tensor
    log_mu: torch.Tensor


def random_model(family: str, tied: bool) -> torch.nn.Module:
    """Two layers, 8 heads of 8 over a hidden size of 32, 4 key-value heads, 37 tokens; nothing of it is a default.

    Its log-probs are far from uniform, and no norm or bias is 1 or 0.
    """
    config = FAMILIES[family](
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, tie_word_embeddings=tied, sliding_window=None, rms_norm_eps=4e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 777.0},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix = parameter.ndim == 2
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


def from_folder(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def predictions(model: torch.nn.Module, trajectory: Trajectory, temperature: float = TEMPERATURE) -> Prediction:
    """With gradient in log_pi."""
    ids = torch.from_numpy(trajectory.token_ids)
    log_probs = torch.log_softmax(model(ids[None]).logits[0] / temperature, -1)[:-1]
    trained = torch.from_numpy(trajectory.trainable)[1:]
    log_pi = log_probs.gather(1, ids[1:, None]).squeeze(1)
    return Prediction(log_pi[trained], torch.from_numpy(trajectory.sampler_logprobs)[1:][trained])


def trajectories_of(vocab: int) -> list[Trajectory]:
    """The sequences of `layouts`, one after the other."""
    return [trajectory for group in groups_of(vocab) for trajectory in group.trajectories]


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
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference over the reference's largest absolute value."""
    return float((value - reference).abs().max() / reference.abs().max())


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert set(ours) == set(theirs)
    distances = {name: relative(ours[name], tensor) for name, tensor in theirs.items()}
    worst = max(distances, key=distances.__getitem__)
    assert distances[worst] <= tolerance, (worst, distances[worst])
