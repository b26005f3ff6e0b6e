"""Sampled groups, and the ledger of all prompts, as JSON and back, bit for bit, for checkpoints."""

import base64
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from gppo_verifiers.types import Status, Verdict
from numpy.typing import NDArray

from gppo_megatron.data.prompts import StreamState
from gppo_megatron.errors import CheckpointError
from gppo_megatron.rollout.source import PromptStream
from gppo_megatron.rollout.tickets import Ledger, Ticket, Totals
from gppo_megatron.types import Group, Prompt, TopTokens, Trajectory

ARRAYS = {"token_ids": "<i8", "sampler_logprobs": "<f4", "trainable": "|b1", "policy_versions": "<i8"}
TOP_ARRAYS = {"ids": "<i4", "logprobs": "<f4", "rest": "<f4"}


def group_to_json(group: Group) -> dict[str, Any]:
    """Everything but the prompt, of which only the id is kept: it comes from the data again."""
    return {"prompt": group.prompt.id, "trajectories": [_trajectory_to_json(each) for each in group.trajectories]}


def group_from_json(stored: Mapping[str, Any], prompt: Prompt) -> Group:
    """Raises CheckpointError where `prompt` is another one, KeyError or ValueError where `stored` is no group."""
    check_prompt(stored["prompt"], prompt)
    return Group(prompt, tuple(_trajectory_from_json(each) for each in stored["trajectories"]))


def check_prompt(stored_id: str, prompt: Prompt) -> None:
    """Raises CheckpointError unless it is the id of `prompt`."""
    if stored_id != prompt.id:
        raise CheckpointError(
            f"the checkpoint was sampling for prompt {stored_id!r} where the data have {prompt.id!r}: they have changed"
        )


def ledger_to_json(ledger: Ledger, groups: Mapping[int, Mapping[str, Any]], stream: StreamState) -> dict[str, Any]:
    """groups: those that are ready, as JSON, by ticket. stream: where it stands."""
    totals, outstanding = ledger.totals, [*ledger.flying.values(), *(ticket for ticket, _ in ledger.ready.values())]
    first = min(outstanding, key=lambda ticket: ticket.number, default=None)
    return {
        # The prompts of all outstanding tickets are taken from here again.
        "stream": asdict(first.origin if first else stream),
        "first": first.number if first else totals.dispatched,
        "dispatched": totals.dispatched,
        "trained": totals.trained,
        "filtered": dict(totals.filtered),
        "dropped": dict(totals.dropped),
        "flying": [_ticket_to_json(ticket) for ticket in ledger.flying.values()],
        "ready": [
            {**_ticket_to_json(ticket), "oldest": oldest, "group": groups[ticket.number]}
            for ticket, oldest in ledger.ready.values()
        ],
    }


def ledger_from_json(state: Mapping[str, Any], stream: PromptStream) -> tuple[Ledger, dict[int, Group]]:
    """The ledger and its groups; `stream` is set to where it stood. Raises CheckpointError."""
    try:
        stream.restore(StreamState(**state["stream"]))
        first, dispatched = int(state["first"]), int(state["dispatched"])
        tickets: dict[int, Ticket] = {}
        stored = {each["number"]: each for each in (*state["flying"], *state["ready"])}
        for number in range(first, dispatched):
            origin = stream.state()
            (prompt,) = stream.take(1)
            if number in stored:
                tickets[number] = _ticket_from_json(stored[number], prompt, origin)
        ledger = Ledger()
        ledger.totals = Totals(dispatched, state["trained"], Counter(state["filtered"]), Counter(state["dropped"]))
        ledger.flying = {each["number"]: tickets[each["number"]] for each in state["flying"]}
        ledger.ready = {each["number"]: (tickets[each["number"]], each["oldest"]) for each in state["ready"]}
        groups = {
            each["number"]: group_from_json(each["group"], tickets[each["number"]].prompt) for each in state["ready"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's prompts and buffer do not fit this run: {error!r}") from error
    return ledger, groups


def _ticket_to_json(ticket: Ticket) -> dict[str, Any]:
    fields = {"number": ticket.number, "step": ticket.step, "place": ticket.place, "version": ticket.version}
    return {**fields, "prompt": ticket.prompt.id}


def _ticket_from_json(stored: Mapping[str, Any], prompt: Prompt, origin: StreamState) -> Ticket:
    check_prompt(stored["prompt"], prompt)
    return Ticket(stored["number"], prompt, origin, stored["step"], stored["place"], stored["version"])


def _trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    if trajectory.experts is not None:
        raise ValueError("groups with experts are not sampled ahead")
    verdict = trajectory.verdict
    return {
        **{name: _text(getattr(trajectory, name), dtype) for name, dtype in ARRAYS.items()},
        "finish": trajectory.finish,
        "verdict": [verdict.score, verdict.status.value, verdict.detail],
        "penalty": trajectory.penalty,
        "top": None if trajectory.top is None else _top_to_json(trajectory.top),
    }


def _trajectory_from_json(stored: Mapping[str, Any]) -> Trajectory:
    score, status, detail = stored["verdict"]
    arrays: dict[str, Any] = {name: _array(stored[name], dtype) for name, dtype in ARRAYS.items()}
    return Trajectory(
        **arrays,
        finish=stored["finish"],
        verdict=Verdict(score, Status(status), detail),
        penalty=stored["penalty"],
        top=None if stored["top"] is None else _top_from_json(stored["top"]),
    )


def _top_to_json(top: TopTokens) -> dict[str, Any]:
    return {"count": top.ids.shape[1]} | {name: _text(getattr(top, name), dtype) for name, dtype in TOP_ARRAYS.items()}


def _top_from_json(stored: Mapping[str, Any]) -> TopTokens:
    ids, logprobs, rest = (_array(stored[name], dtype) for name, dtype in TOP_ARRAYS.items())
    return TopTokens(ids.reshape(len(rest), stored["count"]), logprobs.reshape(len(rest), stored["count"]), rest)


def _text(array: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode("ascii")


def _array(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
