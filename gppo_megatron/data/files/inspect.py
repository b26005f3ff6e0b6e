"""`gppo data inspect`: the report on a data set, without a run."""

import sys

from gppo_megatron.config.schema import FileData
from gppo_megatron.data.files.sets import Sets, read_sets
from gppo_megatron.data.files.templates import TEMPLATES, Writer
from gppo_megatron.data.render import Tokenizer

FAULTY = 3


def inspect(config: FileData, tokenizer: Tokenizer | None) -> int:
    """Print the report; progress goes to stderr. Returns the exit status: 3 with `strict` where rows are left out.

    tokenizer: None leaves the prompts' length and characters unchecked.
    Raises DataError for files that cannot be read, and for a template whose stops the tokenizer cannot express.
    """
    writer = None
    if tokenizer is not None:
        writer = Writer(TEMPLATES[config.template], config.chat, tokenizer)
        writer.stop_ids()
    sets = read_sets(config, writer, lambda line: print(line, file=sys.stderr, flush=True))
    print(sets)
    print(_lengths(sets) if writer else "prompt lengths and characters: not checked, as no model is named")
    return FAULTY if config.strict and sets.dropped else 0


def _lengths(sets: Sets) -> str:
    problems = [*sets.train.problems, *(sets.evaluation.problems if sets.evaluation else ())]
    lengths = sorted(len(kept.written.prompt_ids) for kept in problems if kept.written)
    if not lengths:
        return "prompt lengths: no problem is left"
    half = lengths[len(lengths) // 2]
    return f"prompt lengths: {lengths[0]:,} to {lengths[-1]:,} tokens, half of them at most {half:,}"
