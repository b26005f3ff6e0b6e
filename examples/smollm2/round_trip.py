"""Does a real model survive the round trip? Hugging Face -> Megatron-Core -> Hugging Face, then the same questions.

`python examples/smollm2/round_trip.py MODEL_FOLDER WORK_FOLDER` prints the answers before and after; status 0 if equal.
"""

import shutil
import sys
from pathlib import Path

import torch
import transformers

from checkpoints_tools.convert import Options, hf_to_megatron, megatron_to_hf
from checkpoints_tools.verify import compare_folders

QUESTIONS = ("The capital of France is", "Water boils at", "def fibonacci(n):", "2 + 2 =")


def answers(folder: Path) -> tuple[list[str], torch.Tensor]:
    """Greedy answers, and the logits behind the first token of each, [questions, vocabulary]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    texts, logits = [], []
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt")
        with torch.no_grad():
            logits.append(model(**ids).logits[0, -1])
            answer = model.generate(**ids, max_new_tokens=12, do_sample=False)
        texts.append(tokenizer.decode(answer[0]))
    return texts, torch.stack(logits)


def main(model: Path, work: Path) -> int:
    transformers.logging.disable_progress_bar()
    shutil.rmtree(work, ignore_errors=True)
    hf_to_megatron(model, work / "megatron", Options(processes=2), print)
    megatron_to_hf(work / "megatron", work / "hf", Options(), print)
    same = compare_folders(model, work / "megatron", 32, print)
    (before, logits_before), (after, logits_after) = answers(model), answers(work / "hf")
    for text in after:
        print(repr(text))
    equal = same and before == after and torch.equal(logits_before, logits_after)
    print("OK: the same answers and bit-equal logits before and after" if equal else f"DIFFERENT: {before}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
