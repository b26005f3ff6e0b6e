"""The `gppo` command. Torch is imported only where training really starts."""

import errno
import os
import signal
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_args

from gppo_verifiers.errors import ServiceError
from gppo_verifiers.sandbox.base import IsolationError
from gppo_verifiers.service.arguments import above_zero, add_service_arguments, count, port_number, read_options

from checkpoints_tools.arguments import add_convert_arguments
from gppo_megatron.config.bounds import problem_with
from gppo_megatron.config.checks import check, check_run_folder, check_world
from gppo_megatron.config.derived import describe
from gppo_megatron.config.load import dump, load
from gppo_megatron.config.problems import config_error
from gppo_megatron.config.rollouts import SglangRollout
from gppo_megatron.config.schema import AdapterName, FileData, HfModel, RunConfig, TemplateName
from gppo_megatron.config.server_checks import check_started
from gppo_megatron.errors import CheckpointError, ConfigError, GppoError, Interrupted, PeerLostError, VerifierError

EXAMPLES = """\
examples:
  gppo train run.yaml --print                       show the resolved configuration, and stop
  gppo train run.yaml steps=10 optimizer.lr=1e-5    train in this process, with two keys changed
  gppo launch run.yaml                              start all processes of the run on this machine
  gppo launch run.yaml --resume                     go on where the run stopped, or start it
  gppo eval run.yaml --samples 8                    what the trained model scores on the held-out problems
  gppo selftest --nproc 4                           compare every layout of 4 processes with one process
  gppo data inspect train.parquet --adapter dapo_math --model FOLDER
                                                    what would be left out of a data set, and why
  gppo convert hf-to-megatron FROM TO               a Hugging Face folder into a distributed checkpoint; and back
"""
OPTIONS = {"columns": "column"}
"""Keys of `data:` whose option has another name."""
NEEDS = {
    "chat": "model",
    "max_prompt_tokens": "model",
    "evaluation_adapter": "evaluation",
    "evaluation_repeats": "evaluation",
}
"""Options of `gppo data inspect` that do nothing without another."""
FULL = (errno.ENOSPC, errno.EDQUOT)
INTERRUPTED = 128 + signal.SIGINT
READER_GONE = 128 + signal.SIGPIPE
RANK_0_FIRST_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status. A user's mistake is a message on stderr, never a traceback."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        # Blocked inside a collective, Python would never get to raise KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        status = _run(options, rank)
        sys.stdout.flush()  # here, where a reader that is gone can still be told from a bug
        return status
    except BrokenPipeError:  # as in `gppo train run.yaml --print | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return READER_GONE
    except PeerLostError as error:
        return error.exit_code  # the process that was lost, or the launcher, says why
    except Interrupted as error:
        if rank == 0:
            print(f"SIGTERM: {error}", file=sys.stderr)
        return error.exit_code
    except GppoError as error:
        # Most mistakes are found by every process: the launcher stops the others before they repeat rank 0.
        time.sleep(0 if rank == 0 else RANK_0_FIRST_SECONDS)
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"no space left on the disk{f' for {error.filename}' if error.filename else ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(options: Namespace, rank: int) -> int:
    match options.command:
        case "launch":
            return _launch(options)
        case "data":
            return _inspect(options)
        case "eval":
            return _evaluate(options)
        case "serve-embedded":
            return _serve(options)
        case "convert":
            return _convert(options)
        case "selftest":
            return _selftest(options, rank)
        case "serve-verifiers":
            return _serve_verifiers(options)
        case _:
            return _train(options, rank)


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="gppo",
        description="Train language models with GPPO reinforcement learning on Megatron-Core.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train, as one process of the run", allow_abbrev=False)
    train.add_argument("--print", action="store_true", help="show the resolved configuration and what follows from it")
    launch = commands.add_parser("launch", help="start every process of a run and watch them", allow_abbrev=False)
    launch.add_argument("--on", choices=["local"], default="local", help="where: local is this machine, the default")
    evaluate = commands.add_parser("eval", help="evaluate a model folder on a run's held-out set", allow_abbrev=False)
    evaluate.add_argument(
        "--model", metavar="FOLDER", help="a Hugging Face folder, or a checkpoint of a run; default: <run>/hf"
    )
    evaluate.add_argument(
        "--server", action="append", default=[], metavar="URL", help="ask a running server instead; may be repeated"
    )
    evaluate.add_argument("--samples", type=count, default=1, metavar="N", help="answers to each problem, default 1")
    evaluate.add_argument("--problems", type=count, metavar="N", help="only the first N; default: all of them")
    evaluate.add_argument("--out", metavar="FOLDER", help="where the answers are kept; default: <run>/eval")
    for command in (train, launch):
        command.add_argument("--resume", action="store_true", help="go on from the run's newest checkpoint, if any")
    for command in (train, launch, evaluate):
        command.add_argument("run", metavar="RUN.yaml", help="the run's configuration")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="a changed key, e.g. optimizer.lr=1e-5")
    serve = commands.add_parser(
        "serve-embedded", help="serve a model folder by SGLang's protocol, on this CPU", allow_abbrev=False
    )
    serve.add_argument("model", metavar="FOLDER", help="a Hugging Face folder")
    serve.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    serve.add_argument("--port", type=port_number, default=30000, help="default: 30000; 0 takes a free one")
    serve.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="as the trainer's")
    serve.add_argument("--context", type=count, metavar="N", help="most tokens of a prompt and its response")
    serve.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND[@update][:FIRST[:COUNT]]",
        help="do wrong on purpose, for tests (docs/servers.md); may be repeated",
    )
    selftest = commands.add_parser("selftest", help="compare every layout with one process", allow_abbrev=False)
    selftest.add_argument("--nproc", type=count, metavar="N", help="processes; default: what torchrun started, or 2")
    selftest.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu")
    selftest.add_argument(
        "--tolerance", type=above_zero, default=2e-5, metavar="X", help="largest relative difference, default 2e-5"
    )
    selftest.add_argument(
        "--folder", metavar="PATH", help="one that all nodes see, for checkpoints; default: temporary"
    )
    add_service_arguments(
        commands.add_parser("serve-verifiers", help="judge programs for other machines", allow_abbrev=False)
    )
    _add_data_command(commands.add_parser("data", help="look at data without a run", allow_abbrev=False))
    add_convert_arguments(
        commands.add_parser("convert", help="Hugging Face and Megatron-Core checkpoints", allow_abbrev=False)
    )
    options, rest = parser.parse_known_args(arguments)
    # argparse stops collecting `key=value` at the first option; those after it are left over.
    unknown = [argument for argument in rest if argument.startswith("-") or not hasattr(options, "overrides")]
    if unknown:
        parser.error(f"no such option: {' '.join(unknown)}")
    if rest:
        options.overrides += rest
    return options


def _add_data_command(parser: ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect", help="report what is wrong with a data set, row by row", allow_abbrev=False
    )
    adapters, templates = get_args(AdapterName), get_args(TemplateName)
    shown = FileData(path="")
    inspect.add_argument("path", metavar="PATH", help="a file, a folder, or a pattern in quotes")
    inspect.add_argument("--adapter", choices=adapters, default=shown.adapter, help="how rows are read")
    inspect.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME=COLUMN",
        help="the column that holds the prompt or the answer: prompt=question, answer=final_answer",
    )
    inspect.add_argument("--template", choices=templates, default=shown.template, help="how problems are written")
    inspect.add_argument("--chat", action="store_true", help="write them with the tokenizer's chat template")
    inspect.add_argument("--model", metavar="FOLDER", help="also check the prompts' length and characters for it")
    inspect.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help=f"with --model: the limit, default {shown.max_prompt_tokens}"
    )
    inspect.add_argument("--evaluation", metavar="PATH", help="the set to evaluate on, which PATH must not overlap")
    inspect.add_argument("--evaluation-adapter", choices=adapters, help="how its rows are read, where that differs")
    inspect.add_argument("--evaluation-repeats", action="store_true", help="its problems may be there several times")
    inspect.add_argument("--strict", action="store_true", help="exit with status 3 if any row would be left out")


def _train(options: Namespace, rank: int) -> int:
    config = _checked(options)
    if options.print:
        print(dump(config))
        print("\n".join(f"# {line}" for line in describe(config).splitlines()))
        return 0
    if options.resume and _is_complete(config):
        return 0
    check_world(config, int(os.environ.get("WORLD_SIZE", "1")))
    check_started(config, os.environ)
    if rank == 0:
        check_run_folder(config, options.resume)
        print(describe(config), flush=True)
    # Megatron-Core tells at import what it runs without (Apex, Transformer Engine); none of it is the user's to mend.
    warnings.filterwarnings("ignore", module="megatron")
    try:
        from gppo_megatron.build import run_training
    except ModuleNotFoundError as error:
        raise _missing_package(error) from None
    run_training(config, options.resume)
    return 0


def _is_complete(config: RunConfig) -> bool:
    """Whether there is nothing left to resume; says so."""
    trained = Path(config.run) / "hf"
    if trained.exists() and os.environ.get("RANK", "0") == "0":
        print(f"this run is complete: its trained model is {trained}")
    return trained.exists()


def _launch(options: Namespace) -> int:
    config = _checked(options)
    if options.resume and _is_complete(config):
        return 0
    check_run_folder(config, options.resume)
    from launchers.local import free_port, run_processes
    from launchers.plan import plan_processes
    from launchers.servers import open_servers

    arguments = [*options.overrides, *(["--resume"] if options.resume else [])]
    servers = open_servers(config, os.environ)
    return run_processes(plan_processes(config, options.run, arguments, free_port()), config.save.grace, servers)


def _serve(options: Namespace) -> int:
    try:
        import torch
        import uvicorn  # noqa: F401 - the first of the extra's packages that would be missing
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'gppo-megatron[train,serve]'") from error

    from gppo_megatron.serving.command import serve
    from gppo_megatron.serving.faults import read_fault

    faults = [read_fault(text) for text in options.fault]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    serve(Path(options.model), options.host, options.port, dtype, options.context, faults)
    return 0


def _serve_verifiers(options: Namespace) -> int:
    try:
        from gppo_verifiers.service.command import selftest, serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gppo_"):
            raise
        raise ConfigError(f"{error.name} is not installed; pip install 'gppo-megatron[serve]'") from error
    try:
        if options.selftest:
            return selftest(options.sandbox, options.languages)
        serve(read_options(options, os.environ))
    except IsolationError as error:
        raise VerifierError(f"programs cannot be run safely here: {error}") from error
    except ServiceError as error:
        raise ConfigError(f"{error}") from error
    return 0


def _evaluate(options: Namespace) -> int:
    config = _checked(options)
    model = Path(options.model or _evaluated_folder(config, options.server))
    if problem := problem_with(SglangRollout, "urls", tuple(options.server)) if options.server else None:
        raise ConfigError(f"--server: {problem}")
    if not model.is_dir():
        raise ConfigError(f"{model}: no such folder; name a model folder with --model")
    try:
        from gppo_megatron.build_evaluation import run_evaluation
    except ModuleNotFoundError as error:
        raise _missing_package(error) from None
    out = Path(options.out or f"{config.run}/eval")
    run_evaluation(config, model, options.server, out, options.samples, options.problems)
    return 0


def _evaluated_folder(config: RunConfig, servers: list[str]) -> str:
    """Servers need but a tokenizer: that of the model the run began with will do."""
    return config.model.path if servers and isinstance(config.model, HfModel) else f"{config.run}/hf"


def _convert(options: Namespace) -> int:
    warnings.filterwarnings("ignore", module="megatron")
    if options.convert_command == "inspect":
        from checkpoints_tools.inspect import describe

        lines, complete = describe(Path(options.source), options.keys)
        print("\n".join(lines))
        return 0 if complete else CheckpointError.exit_code
    try:
        from checkpoints_tools.command import run
    except ModuleNotFoundError as error:
        raise _missing_package(error) from None
    return run(options)


def _selftest(options: Namespace, rank: int) -> int:
    """Under torchrun one process of the test; otherwise starts all of them on this machine."""
    started = os.environ.get("WORLD_SIZE")
    processes = options.nproc or int(started or "2")
    if started is not None and int(started) != processes:
        raise ConfigError(f"--nproc: {started} processes were started (got {processes}); leave it out")
    if started is None and processes > 1:
        from launchers.local import free_port, run_processes
        from launchers.plan import plan_command

        arguments = ["selftest", "--device", options.device, "--tolerance", str(options.tolerance)]
        arguments += ["--folder", options.folder] if options.folder else []
        return run_processes(plan_command(tuple(arguments), processes, threads=1, port=free_port()))
    warnings.filterwarnings("ignore", module="megatron")
    try:
        from gppo_megatron.policy.megatron.platform import device_of
        from gppo_megatron.policy.megatron.selftest import report
    except ModuleNotFoundError as error:
        raise _missing_package(error) from None
    folder = Path(options.folder) if options.folder else None
    return 0 if report(processes, device_of(options.device), options.tolerance, rank == 0, folder) else 1


def _inspect(options: Namespace) -> int:
    columns = dict(column.partition("=")[::2] for column in options.column)
    config = FileData(
        path=options.path,
        adapter=options.adapter,
        columns=columns,
        template=options.template,
        chat=options.chat,
        max_prompt_tokens=FileData.max_prompt_tokens
        if options.max_prompt_tokens is None
        else options.max_prompt_tokens,
        evaluation=options.evaluation,
        evaluation_adapter=options.evaluation_adapter,
        evaluation_repeats=options.evaluation_repeats,
        strict=options.strict,
    )
    problems = [
        f"--{OPTIONS.get(item.name, item.name.replace('_', '-'))}: {problem}"
        for item in fields(config)
        if (problem := problem_with(FileData, item.name, getattr(config, item.name))) is not None
    ]
    problems += [
        f"--{name.replace('_', '-')}: needs --{needed} too"
        for name, needed in NEEDS.items()
        if getattr(options, name) and getattr(options, needed) is None
    ]
    if problems:
        raise config_error("gppo data inspect", problems)
    try:
        from gppo_megatron.data.files.inspect import inspect

        if options.model is None:
            return inspect(config, None)
        from gppo_megatron.data.model_folder import open_folder
    except ModuleNotFoundError as error:
        raise _missing_package(error) from None
    return inspect(config, open_folder(Path(options.model)).tokenizer)


def _missing_package(error: ModuleNotFoundError) -> Exception:
    """What to raise where a package of the extra `train` is not installed; our own missing modules are bugs."""
    if (error.name or "").startswith("gppo_megatron"):
        return error
    return ConfigError(
        f"this needs the package {error.name}, which is not installed; pip install 'gppo-megatron[train]'"
    )


def _checked(options: Namespace) -> RunConfig:
    config = load(options.run, options.overrides)
    check(config, source=options.run)
    return config
