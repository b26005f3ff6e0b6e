"""The `gppo` command. Torch is imported only where training really starts."""

import os
import signal
import sys
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence

from gppo_megatron.config.checks import check, check_run_folder, check_world
from gppo_megatron.config.derived import describe
from gppo_megatron.config.load import dump, load
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.errors import ConfigError, GppoError, PeerLostError

EXAMPLES = """\
examples:
  gppo train run.yaml --print                       show the resolved configuration, and stop
  gppo train run.yaml steps=10 optimizer.lr=1e-5    train in this process, with two keys changed
  gppo launch run.yaml                              start all processes of the run on this machine
"""
INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status. A user's mistake is a message on stderr, never a traceback."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        # Blocked inside a collective, Python would never get to raise KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return _launch(options) if options.command == "launch" else _train(options, rank)
    except PeerLostError as error:
        return error.exit_code  # the process that was lost, or the launcher, says why
    except ConfigError as error:
        if rank == 0:  # every process finds the same mistake
            print(error, file=sys.stderr)
        return error.exit_code
    except GppoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


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
    for command in (train, launch):
        command.add_argument("run", metavar="RUN.yaml", help="the run's configuration")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="a changed key, e.g. optimizer.lr=1e-5")
    options, rest = parser.parse_known_args(arguments)
    # argparse stops collecting `key=value` at the first option; those after it are left over.
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"no such option: {' '.join(unknown)}")
    options.overrides += rest
    return options


def _train(options: Namespace, rank: int) -> int:
    config = _checked(options)
    if options.print:
        print(dump(config))
        print("\n".join(f"# {line}" for line in describe(config).splitlines()))
        return 0
    check_world(config, int(os.environ.get("WORLD_SIZE", "1")))
    if rank == 0:
        check_run_folder(config)
        print(describe(config), flush=True)
    # Megatron-Core tells at import what it runs without (Apex, Transformer Engine); none of it is the user's to mend.
    warnings.filterwarnings("ignore", module="megatron")
    try:
        from gppo_megatron.build import run_training
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gppo_megatron"):
            raise
        raise ConfigError(
            f"training needs the package {error.name}, which is not installed; pip install 'gppo-megatron[train]'"
        ) from None
    run_training(config)
    return 0


def _launch(options: Namespace) -> int:
    config = _checked(options)
    check_run_folder(config)
    from launchers.local import free_port, run_processes
    from launchers.plan import plan_processes

    return run_processes(plan_processes(config, options.run, options.overrides, free_port()))


def _checked(options: Namespace) -> RunConfig:
    config = load(options.run, options.overrides)
    check(config, source=options.run)
    return config
