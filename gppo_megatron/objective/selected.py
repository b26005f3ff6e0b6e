"""Reductions over selected tokens that no NaN of another token leaks into."""

import torch

from gppo_megatron.metrics import Max, Mean


def at_least_float32(values_T: torch.Tensor) -> torch.Tensor:
    """`values_T` in float32, or in float64 where that is what it holds."""
    return values_T.to(torch.promote_types(values_T.dtype, torch.float32))


def only(selected_T: torch.Tensor, values_T: torch.Tensor) -> torch.Tensor:
    """At least float32; 0 with zero gradient where not selected."""
    return torch.where(selected_T, at_least_float32(values_T), 0.0)


def mean_of(values_T: torch.Tensor, selected_T: torch.Tensor) -> Mean[torch.Tensor]:
    """Over the selected finite values; without gradient."""
    values_T = values_T.detach()
    selected_T = selected_T & values_T.isfinite()
    return Mean(only(selected_T, values_T).sum(), selected_T.sum().float())


def fraction_of(flags_T: torch.Tensor, selected_T: torch.Tensor) -> Mean[torch.Tensor]:
    """Of the selected tokens, the share with the flag."""
    return Mean((flags_T & selected_T).sum().float(), selected_T.sum().float())


def largest_of(values_T: torch.Tensor, selected_T: torch.Tensor) -> Max[torch.Tensor]:
    """Of the selected finite values; -inf, which `Max` reads as not measured, where there is none."""
    values_T = at_least_float32(values_T.detach())
    values_T = torch.where(selected_T & values_T.isfinite(), values_T, -torch.inf)
    return Max(torch.cat([values_T, values_T.new_full((1,), -torch.inf)]).max())
