"""Templates: what they write, and that the answer is looked for where they ask for it."""

from typing import get_args

import pytest
from gppo_verifiers.math.extract import EXTRACTORS
from hypothesis import given
from hypothesis import strategies as st

from gppo_megatron.config.schema import TemplateName
from gppo_megatron.data.files.templates import TEMPLATES, Template, Writer
from gppo_megatron.errors import DataError
from tests.unit.code_points import CodePoints, written

PROBLEM = "What is {problem} or {user} of {system}?"
"""A problem may hold anything."""


def test_there_is_a_template_for_every_name() -> None:
    assert set(TEMPLATES) == set(get_args(TemplateName))


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if template.verifier == "math"])
def test_the_extractor_finds_the_answer_that_the_template_asks_for(name: str) -> None:
    template = TEMPLATES[name]
    response = template.response("\\frac{1}{2}")
    assert EXTRACTORS[template.extractor].find(response) == "\\frac{1}{2}"
    assert EXTRACTORS[template.extractor].find(f"I think so.\n{response}") in (
        "\\frac{1}{2}",
        f"I think so.\n{response}",
    )


def test_a_boxed_answer_is_none_after_the_answer_template() -> None:
    boxed, line = TEMPLATES["boxed_user"], TEMPLATES["dapo"]
    assert EXTRACTORS[line.extractor].find(boxed.response("7")) is None
    assert EXTRACTORS[boxed.extractor].find(line.response("7")) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", PROBLEM),
        ("boxed_user", f"{PROBLEM}\nPlease reason step by step, and put your final answer within \\boxed{{}}."),
        (
            "qwen_boxed",
            "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
            f"<|im_start|>user\n{PROBLEM}<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "dapo",
            "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
            f'{PROBLEM}\n\nRemember to put your answer on its own line after "Answer:".',
        ),
        ("plain_question", f"Question: {PROBLEM}\nAnswer:"),
    ],
)
def test_the_literal_form(name: str, expected: str) -> None:
    prompt_ids = Writer(TEMPLATES[name], False, CodePoints()).write(PROBLEM, "7").prompt_ids
    assert written(prompt_ids) == expected


def test_a_response_after_r1_zero_begins_inside_the_thinking() -> None:
    writer = Writer(TEMPLATES["r1_zero"], False, CodePoints())
    result = writer.write("What is 1+1?", "2")
    prompt = written(result.prompt_ids)
    assert prompt.endswith("\nUser: What is 1+1?\nAssistant: <think>")
    assert written(result.answer_ids) == "</think><answer>2</answer>\0"


@pytest.mark.parametrize("name", TEMPLATES)
def test_in_a_chat_the_tokenizer_writes_the_turns(name: str) -> None:
    template = TEMPLATES[name]
    prompt_ids = Writer(template, True, CodePoints()).write(PROBLEM, "7").prompt_ids
    assert written(prompt_ids) == f"{template.system}|{template.user_turn(PROBLEM)}>{template.reply}"


@given(problem=st.text(), name=st.sampled_from(sorted(TEMPLATES)))
def test_the_problem_is_written_as_it_is(problem: str, name: str) -> None:
    assert TEMPLATES[name].text(problem).count(problem) >= 1
    assert len(TEMPLATES[name].text(problem)) == len(TEMPLATES[name].text("")) + len(problem)


class WholeWords(CodePoints):
    """`<|im_end|>` is one token here."""

    def encode(self, text: str) -> list[int]:
        return [1] if text == "<|im_end|>" else super().encode(text)


def test_stops_are_single_tokens() -> None:
    assert Writer(TEMPLATES["plain_question"], False, CodePoints()).stop_ids() == {ord("\n")}
    assert Writer(TEMPLATES["qwen_boxed"], False, WholeWords()).stop_ids() == {1}
    assert Writer(TEMPLATES["dapo"], False, CodePoints()).stop_ids() == frozenset()
    with pytest.raises(DataError, match=r"ends responses at '<\|im_end\|>', which is 10 tokens for this model"):
        Writer(TEMPLATES["qwen_boxed"], False, CodePoints()).stop_ids()
    assert Writer(TEMPLATES["qwen_boxed"], True, CodePoints()).stop_ids() == frozenset()


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "no place", "answer": "{gold}"},
        {"user": "{problem}{problem}", "answer": "{gold}"},
        {"user": "{problem}", "answer": "gold"},
        {"user": "{problem}", "answer": "{gold}", "literal": "{system}"},
    ],
)
def test_a_template_without_a_place_for_its_parts_cannot_be_built(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="a template"):
        Template(extractor="boxed", **fields)
