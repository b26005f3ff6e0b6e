"""RunConfig -> the judge of its answers; `build` for what depends on neither the model nor the processes."""

import os

from gppo_verifiers.client import Patience, ServiceJudge
from gppo_verifiers.code.jobs import wall_seconds
from gppo_verifiers.code.judge import CodeJudge
from gppo_verifiers.code.selftest import SANDBOXES
from gppo_verifiers.errors import ServiceError, WorkerStartError
from gppo_verifiers.pool import WorkerPool
from gppo_verifiers.routing import ByKind
from gppo_verifiers.sandbox.base import IsolationError, Limits
from gppo_verifiers.types import Judge

from gppo_megatron.config.schema import FileData, LocalCode, RunConfig, ServiceCode
from gppo_megatron.data.files.source import judges_programs
from gppo_megatron.errors import VerifierError


def open_judge(config: RunConfig) -> Judge:
    """The verifiers' worker processes, and a judge of programs where answers are such. Raises VerifierError."""
    try:
        pool = WorkerPool(config.judge.workers, config.judge.timeout)
    except WorkerStartError as error:
        raise VerifierError(f"no verifier process can be started: {error}") from error
    if not (isinstance(config.data, FileData) and judges_programs(config.data)):
        return pool
    try:
        return ByKind({"code": open_code_judge(config.judge.code)}, pool)
    except (IsolationError, ServiceError) as error:
        pool.close()
        reason = f"programs cannot be run safely here: {error}" if isinstance(error, IsolationError) else str(error)
        raise VerifierError(f"judge.code: {reason}") from error


def open_code_judge(config: LocalCode | ServiceCode) -> Judge:
    """The judge of programs, once its sandbox has passed the self-test or its service has answered.

    Raises IsolationError, ServiceError.
    """
    match config:
        case LocalCode():
            limits = Limits(
                cpu_seconds=config.cpu_seconds,
                wall_seconds=wall_seconds(config.cpu_seconds),
                memory_bytes=config.memory_mib << 20,
            )
            return CodeJudge(SANDBOXES[config.sandbox](), config.workers, limits, ["python"])
        case ServiceCode():
            token = None if config.token_env is None else os.environ[config.token_env]
            patience = Patience(config.request_seconds, config.recovery_seconds, config.attempts)
            judge = ServiceJudge(config.urls, token, patience)
            judge.check()
            return judge
