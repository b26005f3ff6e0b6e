"""An engine inside the trainer's process: a Hugging Face module, a key-value cache and a step loop of our own."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from gppo_megatron.data.fused_experts import one_expert_at_a_time
from gppo_megatron.errors import GppoError, SyncError
from gppo_megatron.rollout.engine import Completion, Request
from gppo_megatron.rollout.likeliest import Likeliest
from gppo_megatron.rollout.routed import Routed, Routers


class Drawn(NamedTuple):
    """Tokens int64 [n], and their log-probs float32 [n]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor


class EmbeddedEngine:
    """Engine and WeightSink in one. Its weights come from `load` alone: before that it holds NaN.

    folder: a Hugging Face model folder, of which only config.json is read.
    cache_tokens: most tokens (rows x longest row, prompt and response) the key-value cache may hold.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, cache_tokens: int) -> None:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with device:
            self._model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            ).eval()
        self._routers = Routers(self._model)
        # A tied head is no parameter of its own here, so neither may it be one of the weights.
        self._parameters: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(False).fill_(torch.nan)
            self._parameters.update(one_expert_at_a_time(name, parameter))
        self._device = device
        self._cache_tokens = cache_tokens
        self._vocab: int = config.vocab_size
        self._version = -1

    @property
    def version(self) -> int:
        """The policy version it holds; -1 before the first weights, and after weights that did not fit."""
        return self._version

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter by its Hugging Face name, as it is now."""
        yield from self._parameters.items()

    def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace every parameter, consuming `weights` to the end. Raises SyncError naming all that does not fit."""
        self._version = -1
        problems: list[str] = []
        loaded: set[str] = set()
        for name, tensor in weights:
            parameter = self._parameters.get(name)
            if parameter is None:
                problems.append(f"{name} is unknown")
            elif name in loaded:
                problems.append(f"{name} came twice")
            elif parameter.shape != tensor.shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, but the model's is {list(parameter.shape)}")
            else:
                parameter.copy_(tensor.detach())
            loaded.add(name)
        problems += [f"{name} is missing" for name in self._parameters if name not in loaded]
        if problems:
            raise SyncError(f"weights of version {version} do not fit the engine's model: " + "; ".join(problems))
        self._version = version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order. Raises ValueError for a request it cannot serve.

        Raises SyncError where the engine holds no weights, GppoError where they give logits that are no numbers.
        """
        if self._version < 0:
            raise SyncError("the embedded engine holds no weights; publish the policy's weights before sampling")
        self._check(requests)
        completions: dict[int, Completion] = {}
        with torch.inference_mode():
            for rows in cut_batches(requests, self._cache_tokens):
                sampled = self._sample([requests[row] for row in rows])
                completions |= zip(rows, sampled, strict=True)
        return [completions[row] for row in range(len(requests))]

    @property
    def has_experts(self) -> bool:
        """Whether requests may ask which experts their tokens went to."""
        return self._routers.layers > 0

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.prompt_ids:
                raise ValueError("a prompt without tokens cannot be continued")
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocab:
                raise ValueError(f"prompt {request.prompt_ids} has a token outside the vocabulary of {self._vocab}")
            if request.sampling.experts and not self.has_experts:
                raise ValueError("a model without experts cannot report which experts its tokens went to")

    def _sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one batch, all rows a token a step; finished rows leave once they are half of it."""
        width = max(request.sampling.max_new_tokens for request in requests)
        rows = _Rows.of(requests, width, self._device)
        input_ids = _left_padded([request.prompt_ids for request in requests], self._device)
        count = len(requests)
        token_ids = torch.zeros(count, width, dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(count, width, dtype=torch.float32, device=self._device)
        lengths = torch.zeros(count, dtype=torch.int64, device=self._device)
        stopped = torch.zeros(count, dtype=torch.bool, device=self._device)
        likeliest = Likeliest(requests, width, self._device)
        routed = Routed(requests, width, self._routers, self._device)
        cache = transformers.DynamicCache()
        for step in range(width):
            # By position: the name of the cache's argument depends on the release of transformers.
            output = self._model(input_ids, rows.mask, rows.positions, cache, use_cache=True, logits_to_keep=1)
            routed.note(rows.places, step)
            drawn = draw(output.logits[:, -1], rows.temperatures, rows.uniforms[:, step])
            token_ids[rows.places, step] = drawn.token_ids
            logprobs[rows.places, step] = drawn.logprobs
            likeliest.note(rows.places, step, output.logits[:, -1], rows.temperatures, drawn.token_ids)
            lengths[rows.places] += ~rows.finished
            ends = (drawn.token_ids[:, None] == rows.stop_ids).any(dim=1)
            stopped[rows.places] |= ends & ~rows.finished
            rows.finished |= ends | (rows.limits == step + 1)
            finished = int(rows.finished.sum())
            if finished == len(rows.finished):
                break
            input_ids = drawn.token_ids[:, None]
            if 2 * finished >= len(rows.finished):
                kept = (~rows.finished).nonzero()[:, 0]
                rows, input_ids = rows.select(kept), input_ids[kept]
                cache.batch_select_indices(kept)
            rows.advance()
        ids, logs = token_ids.cpu().numpy(), logprobs.cpu().numpy()
        if np.isnan(logs).any():
            raise GppoError(
                f"sampling from weights of version {self._version} gives NaN: the weights are damaged, or training "
                "diverged; lower the learning rate, or begin from another model"
            )
        counts = lengths.tolist()
        rows_out = zip(counts, stopped.tolist(), likeliest.rows(counts), routed.rows(counts), strict=True)
        return [
            Completion(
                token_ids=ids[row, :length].copy(),
                logprobs=logs[row, :length].copy(),
                versions=np.full(length, self._version, dtype=np.int64),
                finish="stop" if stop else "length",
                top=top,
                experts=experts,
            )
            for row, (length, stop, top, experts) in enumerate(rows_out)
        ]


@dataclass(eq=False)
class _Rows:
    """The rows of a batch that are still sampled, n of them.

    places: int64 [n], each row's place in the batch as it began.
    mask: int64 [n, cached tokens], 1 at real tokens, 0 at padding.
    positions: int64 [n, tokens of the next forward pass].
    temperatures: float32 [n]. limits: int64 [n], max_new_tokens. stop_ids: int64 [n, most stops], -1 where unused.
    uniforms: float64 [n, steps], each row's random numbers. finished: bool [n].
    """

    places: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    limits: torch.Tensor
    stop_ids: torch.Tensor
    uniforms: torch.Tensor
    finished: torch.Tensor

    @classmethod
    def of(cls, requests: Sequence[Request], width: int, device: torch.device) -> "_Rows":
        samplings = [request.sampling for request in requests]
        lengths = torch.tensor([len(request.prompt_ids) for request in requests])
        longest = int(lengths.max())
        mask = (torch.arange(longest) >= longest - lengths[:, None]).to(torch.int64)
        most_stops = max(1, *(len(sampling.stop_ids) for sampling in samplings))
        stop_ids = [[*sorted(s.stop_ids), *[-1] * (most_stops - len(s.stop_ids))] for s in samplings]
        return cls(
            places=torch.arange(len(requests), device=device),
            mask=mask.to(device),
            positions=(mask.cumsum(dim=1) - 1).clamp(min=0).to(device),
            temperatures=torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device),
            limits=torch.tensor([s.max_new_tokens for s in samplings], device=device),
            stop_ids=torch.tensor(stop_ids, device=device),
            uniforms=torch.from_numpy(_uniforms(requests, width)).to(device),
            finished=torch.zeros(len(requests), dtype=torch.bool, device=device),
        )

    def select(self, kept: torch.Tensor) -> "_Rows":
        """The rows at `kept`, int64 indices."""
        return _Rows(**{field.name: getattr(self, field.name)[kept] for field in fields(self)})

    def advance(self) -> None:
        """Make room for the token each row has just drawn."""
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        self.positions = self.positions[:, -1:] + 1


def cut_batches(requests: Sequence[Request], cache_tokens: int) -> list[list[int]]:
    """The requests' indices in batches of like length, with rows x (longest prompt + largest limit) <= cache_tokens.

    Raises ValueError where one request alone does not fit.
    """

    def tokens(row: int) -> tuple[int, int]:
        return len(requests[row].prompt_ids), requests[row].sampling.max_new_tokens

    batches: list[list[int]] = []
    prompt = limit = 0
    for row in sorted(range(len(requests)), key=lambda row: (sum(tokens(row)), tokens(row))):
        row_prompt, row_limit = tokens(row)
        if row_prompt + row_limit > cache_tokens:
            raise ValueError(
                f"a prompt of {row_prompt} tokens with {row_limit} new ones needs {row_prompt + row_limit} cached "
                f"tokens, but rollout.cache_tokens is {cache_tokens}"
            )
        prompt, limit = max(prompt, row_prompt), max(limit, row_limit)
        if not batches or (len(batches[-1]) + 1) * (prompt + limit) > cache_tokens:
            batches.append([])
            prompt, limit = row_prompt, row_limit
        batches[-1].append(row)
    return batches


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> Drawn:
    """Draw a token a row by inverting the cumulative distribution of softmax(logits / temperature).

    logits: [n, vocabulary]. temperatures: float32 [n]. uniforms: float64 [n] in [0, 1].
    A token of probability zero is never drawn. Where logits are NaN, so are the log-probs, and the tokens any.
    """
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    token_ids = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # A number that reaches the total would point past the last token that can be drawn.
    token_ids = token_ids.minimum(torch.searchsorted(cumulative, total)).clamp(max=logits.shape[-1] - 1)
    return Drawn(token_ids[:, 0], logprobs.gather(1, token_ids)[:, 0])


def _uniforms(requests: Sequence[Request], width: int) -> NDArray[np.float64]:
    """float64 [rows, width]: each row's own random numbers, so that no row depends on its neighbours."""
    uniforms = np.zeros((len(requests), width))
    for row, request in enumerate(requests):
        limit = request.sampling.max_new_tokens
        uniforms[row, :limit] = np.random.Generator(np.random.Philox(key=request.seed)).random(limit)
    return uniforms


def _left_padded(prompts: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """int64 [rows, longest]: every prompt ends in the last column; token 0 fills the rest."""
    longest = max(map(len, prompts))
    return torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts], device=device)
