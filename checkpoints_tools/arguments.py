"""The arguments of `gppo convert`. Nothing heavy is imported before a command runs."""

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter

EXAMPLES = """\
examples:
  gppo convert hf-to-megatron qwen3/ qwen3-megatron/ --processes 8
  gppo convert megatron-to-hf run/checkpoints/step-100 qwen3-trained/
  gppo convert inspect qwen3-megatron/
  gppo convert verify qwen3/ qwen3-megatron/ --tokens 64
"""
DTYPES = ("float32", "bfloat16", "float16")


def add_convert_arguments(parser: ArgumentParser) -> None:
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    commands = parser.add_subparsers(dest="convert_command", required=True, metavar="COMMAND")
    into = commands.add_parser("hf-to-megatron", help="a Hugging Face folder into a distributed checkpoint")
    back = commands.add_parser("megatron-to-hf", help="a distributed checkpoint into a Hugging Face folder")
    again = commands.add_parser("reshard", help="weights into chunks of another size; check that a layout fits them")
    for command in (into, back, again):
        command.add_argument("source", metavar="FROM", help="the folder to read; it is not changed")
        command.add_argument("target", metavar="TO", nargs="?" if command is again else None, help="the folder to make")
        command.add_argument("--processes", type=int, default=1, metavar="N", help="that write at a time, default 1")
        command.add_argument("--dry-run", action="store_true", help="check everything, write nothing")
        command.add_argument("--config", metavar="FOLDER", help="config.json and tokenizer, where FROM has none")
    for command in (into, back):
        command.add_argument("--dtype", choices=DTYPES, help="convert the numbers; default: each tensor keeps its own")
        command.add_argument("--provider", default="builtin", help="builtin, the default, or megatron-bridge")
    for command in (into, again):
        command.add_argument("--tensor", type=int, default=1, metavar="N", help="cut as tensor parallelism does, in N")
    again.add_argument("--pipeline", type=int, default=1, metavar="N", help="pipeline stages to check for")
    look = commands.add_parser("inspect", help="what a folder is, and whether it is complete; reads headers alone")
    look.add_argument("source", metavar="FOLDER")
    look.add_argument("--keys", action="store_true", help="list the tensors")
    check = commands.add_parser("verify", help="read a folder again, or compare two, tensor by tensor")
    check.add_argument("source", metavar="FOLDER")
    check.add_argument("target", metavar="OTHER", nargs="?", help="a folder of either kind to compare with")
    check.add_argument(
        "--tokens", type=_tokens, default=0, metavar="N", help="also compare logits over N random tokens"
    )


def _tokens(text: str) -> int:
    """A whole number; argparse names the option where it is not."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a whole number >= 0 (got {text!r})")
    return int(text)
