"""How a problem is written and where its answer is then looked for: one row, so that the two cannot disagree."""

from dataclasses import dataclass
from typing import Literal

from gppo_megatron.data.render import Tokenizer, answer_ids
from gppo_megatron.errors import DataError

PROBLEM = "{problem}"


@dataclass(frozen=True)
class Template:
    """One way to put a problem.

    user: what the user writes; holds {problem} once. system: instructions ahead of it.
    extractor: how the math verifier finds the answer in a response; answer: a response in that form, around {gold}.
    literal: the prompt where no chat template is used; holds {user} once, and {system} where there is one.
    reply: how the response begins; it is part of the prompt, in both forms.
    stops: text that ends a response to the literal form (in a chat, the tokenizer's end of turn does).
    verifier: the kind that judges its answers; code finds a program by itself, without an extractor of math's.
    """

    user: str
    extractor: str
    answer: str
    system: str = ""
    literal: str = "{user}"
    reply: str = ""
    stops: tuple[str, ...] = ()
    verifier: Literal["math", "code"] = "math"

    def __post_init__(self) -> None:
        if self.user.count(PROBLEM) != 1 or self.literal.count("{user}") != 1:
            raise ValueError("a template holds {problem} once in `user`, and {user} once in `literal`")
        if "{gold}" not in self.answer:
            raise ValueError("a template's `answer` holds {gold}")

    def user_turn(self, problem: str) -> str:
        """What the user writes."""
        before, after = self.user.split(PROBLEM)
        return before + problem + after

    def text(self, problem: str) -> str:
        """The whole prompt where no chat template is used."""
        before, after = self.literal.replace("{system}", self.system).split("{user}")
        return before + self.user_turn(problem) + after + self.reply

    def response(self, gold: str) -> str:
        """The shortest response that holds `gold` where the extractor looks."""
        return self.answer.replace("{gold}", gold)


BOXED = "\\boxed{{gold}}"

TEMPLATES: dict[str, Template] = {
    "none": Template(user=PROBLEM, extractor="boxed", answer=BOXED),
    "boxed_user": Template(
        user="{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
        extractor="boxed",
        answer=BOXED,
    ),
    "qwen_boxed": Template(
        system="Please reason step by step, and put your final answer within \\boxed{}.",
        user=PROBLEM,
        literal=("<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"),
        stops=("<|im_end|>",),
        extractor="boxed",
        answer=BOXED,
    ),
    "dapo": Template(
        user=(
            "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
            'Remember to put your answer on its own line after "Answer:".'
        ),
        extractor="answer_line",
        answer="Answer: {gold}",
    ),
    "r1_zero": Template(
        system=(
            "A user asks a question and an assistant solves it. The assistant first thinks, between <think> and "
            "</think>, and then gives nothing but the final answer, between <answer> and </answer>."
        ),
        user=PROBLEM,
        literal="{system}\nUser: {user}\nAssistant: ",
        reply="<think>",
        extractor="answer_tags",
        answer="</think><answer>{gold}</answer>",
    ),
    "gsm8k": Template(
        user="{problem}\nThink step by step, and end with a line that holds #### and the answer.",
        extractor="hash_line",
        answer="#### {gold}",
    ),
    "plain_question": Template(
        user=PROBLEM,
        literal="Question: {user}\nAnswer:",
        stops=("\n",),
        extractor="whole",
        answer=" {gold}",
    ),
    "python_block": Template(
        user=(
            "{problem}\n\nSolve the problem with a Python program. Give the whole program in one block that begins "
            "with ```python and ends with ```."
        ),
        extractor="fenced",
        answer="```python\n{gold}\n```",
        verifier="code",
    ),
    "bare_program": Template(user=PROBLEM, extractor="whole", answer="{gold}", verifier="code"),
}


@dataclass(frozen=True, slots=True)
class Written:
    """A problem in tokens: its prompt, and the shortest right response, end token included; empty if none is known."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Writer:
    """Problems to tokens, in the template's literal form or, with `chat`, in the tokenizer's own."""

    template: Template
    chat: bool
    tokenizer: Tokenizer

    def write(self, problem: str, gold: str | None) -> Written:
        """Raises DataError for text the tokenizer cannot write, and where a chat template is missing.

        gold: None where no answer is known; then there is no response either.
        """
        template, tokenizer = self.template, self.tokenizer
        if self.chat:
            token_ids = tokenizer.encode_chat(template.user_turn(problem), template.system, template.reply)
        else:
            token_ids = tokenizer.encode(template.text(problem))
        response_ids = () if gold is None else answer_ids(template.response(gold), tokenizer)
        return Written(tuple(token_ids), response_ids)

    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a response. Raises DataError for a stop that is more than one token."""
        stops = () if self.chat else self.template.stops
        return frozenset(self._stop_id(stop) for stop in stops)

    def _stop_id(self, stop: str) -> int:
        try:
            token_ids = self.tokenizer.encode(stop)
        except DataError as error:
            raise DataError(f"data.template ends responses at {stop!r}: {error}") from error
        if len(token_ids) != 1:
            raise DataError(
                f"the template ends responses at {stop!r}, which is {len(token_ids)} tokens for this model, and "
                "sampling can only stop at a single token; choose another data.template, or set data.chat to true"
            )
        return token_ids[0]
