"""Ask a Hugging Face model folder: `python -m checkpoints_tools.ask FOLDER PROMPT ...` prints its greedy answers."""

import sys
from argparse import ArgumentParser
from pathlib import Path

import torch
import transformers

from gppo_megatron.data.model_folder import open_folder
from gppo_megatron.errors import GppoError


def main() -> int:
    parser = ArgumentParser(prog="python -m checkpoints_tools.ask", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    try:
        tokenizer = open_folder(options.folder).tokenizer
        model = transformers.AutoModelForCausalLM.from_pretrained(options.folder)
        for prompt in options.prompts:
            ids = torch.tensor([tokenizer.encode(prompt)])
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.max_new_tokens, do_sample=False
            )
            print(prompt + tokenizer.decode(answer[0, ids.shape[1] :].tolist()))
    except GppoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
