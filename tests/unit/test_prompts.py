"""The prompt stream, and problems drawn from reasoning-gym."""

from dataclasses import replace
from typing import Any

import pytest
from gppo_verifiers.reasoning import grade
from gppo_verifiers.types import Task
from hypothesis import given, settings
from hypothesis import strategies as st

from gppo_megatron.config.schema import ReasoningGymData
from gppo_megatron.data.prompts import PromptStream, StreamState
from gppo_megatron.data.reasoning_gym import Problems, draw_problems, is_held_out
from gppo_megatron.errors import DataError
from gppo_megatron.types import Prompt

ALPHABET = "0123456789+-*/=(). "


class Characters:
    """One token a character; 1 ends a response; a chat is ids 100 and 101 around the text."""

    end_id = 1

    def encode(self, text: str) -> list[int]:
        unknown = set(text) - set(ALPHABET)
        if unknown:
            raise DataError(f"characters not in the alphabet: {sorted(unknown)}")
        return [2 + ALPHABET.index(character) for character in text]

    def encode_chat(self, text: str) -> list[int]:
        return [100, *self.encode(text), 101]


def written(token_ids: tuple[int, ...]) -> str:
    return "".join(ALPHABET[token - 2] for token in token_ids)


SUMS = ReasoningGymData(
    task="chain_sum",
    options={"min_terms": 2, "max_terms": 2, "max_digits": 1},
    prompt="{expression}=",
    remove=" ",
    holdout=0.2,
    pool=600,
)


def numbered(count: int) -> list[Prompt]:
    return [Prompt(str(place), (place + 2,), Task("none")) for place in range(count)]


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


@settings(max_examples=50, deadline=None)
@given(length=st.integers(1, 12), seed=st.integers(0, 2**64 - 1), counts=st.lists(st.integers(0, 30), max_size=8))
def test_order_does_not_depend_on_how_many_are_taken_at_once(length: int, seed: int, counts: list[int]) -> None:
    prompts = numbered(length)
    stream, whole = PromptStream(prompts, seed), PromptStream(prompts, seed)
    taken: list[str] = []
    for count in counts:
        taken += ids(stream.take(count))
        resumed = PromptStream(prompts, seed)
        resumed.restore(stream.state())
        assert ids(resumed.take(2 * length + 1)) == ids(_copy(prompts, seed, len(taken)).take(2 * length + 1))
    assert taken == ids(whole.take(sum(counts)))
    assert stream.state() == StreamState(*divmod(sum(counts), length))


def _copy(prompts: list[Prompt], seed: int, skipped: int) -> PromptStream:
    stream = PromptStream(prompts, seed)
    stream.take(skipped)
    return stream


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    stream = PromptStream(numbered(50), seed=3)
    epochs = [ids(stream.take(50)) for _ in range(4)]
    assert all(sorted(epoch, key=int) == [str(place) for place in range(50)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != ids(PromptStream(numbered(50), seed=4).take(50))


def test_order_is_the_same_on_every_machine() -> None:
    assert ids(PromptStream(numbered(8), seed=1).take(16)) == list("3527061406534721")


def test_state_is_exact_at_the_end_of_an_epoch() -> None:
    stream = PromptStream(numbered(3), seed=0)
    stream.take(3)
    assert stream.state() == StreamState(1, 0)


@pytest.mark.parametrize("state", [StreamState(0, 3), StreamState(-1, 0), StreamState(0, -1)])
def test_a_state_of_another_stream_is_refused(state: StreamState) -> None:
    with pytest.raises(ValueError, match="no state of a stream of 3 prompts"):
        PromptStream(numbered(3), seed=0).restore(state)


def test_a_stream_needs_a_prompt() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptStream([], seed=0)


def texts(prompts: tuple[Prompt, ...]) -> list[str]:
    return [written(prompt.token_ids) for prompt in prompts]


def test_problems_are_written_judged_and_answered_right() -> None:
    problems = draw_problems(SUMS, Characters())
    for prompt in problems.train:
        text = written(prompt.token_ids)
        left, operator, right = text[0], text[1], text[2:-1]
        answer = str(int(left) + int(right) if operator == "+" else int(left) - int(right))
        assert prompt.answer_ids == (*Characters().encode(answer), 1)
        assert grade(prompt.task.payload, answer).score == 1.0
        assert grade(prompt.task.payload, answer + "1").score == 0.0


def test_the_split_is_complete_and_disjoint() -> None:
    problems = draw_problems(SUMS, Characters())
    train, heldout = texts(problems.train), texts(problems.heldout)
    assert len({*train, *heldout}) == len(train) + len(heldout) == 600 - problems.duplicates
    # 200 sums of two digits exist; 600 draws meet 190 of them on average, and a fifth is held out.
    assert 175 < len(train) + len(heldout) <= 200
    assert 20 < len(heldout) < 60
    assert len({prompt.id for prompt in (*problems.train, *problems.heldout)}) == len(train) + len(heldout)
    assert str(problems) == (
        f"600 problems drawn, {problems.duplicates} of them duplicates: "
        f"{len(train)} to train on, {len(heldout)} held out"
    )


def test_a_text_stays_on_its_side_whatever_else_is_drawn() -> None:
    small, large = draw_problems(replace(SUMS, pool=60), Characters()), draw_problems(SUMS, Characters())
    other = draw_problems(replace(SUMS, options={**SUMS.options, "max_terms": 3}), Characters())
    for one in (small, other):
        assert not set(texts(one.train)) & set(texts(large.heldout))
        assert not set(texts(one.heldout)) & set(texts(large.train))
    assert set(texts(small.heldout)) < set(texts(large.heldout))


def test_the_same_configuration_draws_the_same_problems() -> None:
    assert draw_problems(SUMS, Characters()) == draw_problems(SUMS, Characters())


def test_the_held_out_share_is_that_of_the_texts() -> None:
    shares = [sum(is_held_out(f"{place}+1=", share) for place in range(10_000)) for share in (0.0, 0.1, 1.0)]
    assert shares[0] == 0
    assert abs(shares[1] - 1000) < 120  # four standard deviations
    assert shares[2] == 10_000


def test_chat_uses_the_template() -> None:
    plain, chat = draw_problems(SUMS, Characters()), draw_problems(replace(SUMS, chat=True), Characters())
    assert [prompt.token_ids for prompt in chat.train] == [(100, *prompt.token_ids, 101) for prompt in plain.train]
    assert [prompt.answer_ids for prompt in chat.train] == [prompt.answer_ids for prompt in plain.train]


def test_a_task_without_reference_gives_no_answer_ids() -> None:
    config = ReasoningGymData(task="rush_hour", prompt="{min_moves}{source_index}", pool=4, holdout=0.0)
    problems: Problems = draw_problems(config, Characters())
    assert [prompt.answer_ids for prompt in problems.train] == [(), (), (), ()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chain_sums"}, "'chain_sums' is not a reasoning-gym task; nearest: chain_sum"),
        ({"task": "composite"}, "composite cannot be used: it mixes tasks"),
        ({"options": {"min_terms": 3, "max_terms": 2}}, "AssertionError: max_terms must be >= min_terms"),
        ({"options": {"terms": 3}}, "unexpected keyword argument 'terms'; its options: allow_negation, max_digits"),
        ({"options": {"size": 3}}, "data.options cannot set size"),
        ({"prompt": "{sum}="}, "KeyError: 'sum'.*fields of chain_sum: difficulty, expression"),
        ({"prompt": "{expression"}, "data.prompt '{expression' cannot be written"),
        ({"prompt": " "}, "leaves no text"),
        ({"prompt": "{num_terms}="}, "leaves out what the answer depends on: '2=' has the answers"),
        ({"prompt": "{expression}?"}, r"prompt '\d[+-]\d\?'.*not in the alphabet: \['\?'\]; add the characters"),
        ({"task": "binary_alternation", "options": {}, "prompt": "{question}", "pool": 20}, "not in the alphabet"),
        ({"pool": 1, "holdout": 0.5}, "1 distinct problems split into"),
        ({"holdout": 1.0}, "split into 0 to train on"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        draw_problems(replace(SUMS, **changes), Characters())


def test_an_answer_the_tokenizer_cannot_write_is_refused() -> None:
    config = ReasoningGymData(task="spell_backward", prompt="{source_index}", pool=20, holdout=0.0)
    with pytest.raises(DataError, match="a problem of spell_backward cannot be written, prompt '0', answer "):
        draw_problems(config, Characters())


def test_a_verifier_that_cannot_be_trusted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gppo_megatron.data.reasoning_gym.probe", lambda payloads: ["chain_sum: 'zzz' scores 1"])
    with pytest.raises(DataError, match="chain_sum cannot be trusted:\n  chain_sum: 'zzz' scores 1"):
        draw_problems(SUMS, Characters())
