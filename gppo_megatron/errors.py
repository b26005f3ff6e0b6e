"""Errors a user can meet. Each message is one sentence or list that says what to do."""


class GppoError(Exception):
    """Base of every error that is printed as a message, without a traceback."""

    exit_code = 1


class ConfigError(GppoError):
    """The run's configuration cannot work; nothing has been started."""

    exit_code = 2


class DataError(GppoError):
    """A data source is missing, unreadable or wrong."""

    exit_code = 3


class CheckpointError(GppoError):
    """A model folder is incomplete, or does not fit the model."""

    exit_code = 4


class VerifierError(GppoError):
    """A verifier cannot be trusted or started."""

    exit_code = 5


class SyncError(GppoError):
    """The rollout engines do not hold the weights they should."""

    exit_code = 6


class PeerLostError(GppoError):
    """Another process of this run is gone; that process, or its launcher, says why."""

    exit_code = 75


class StalledError(GppoError):
    """A process of this run gave no sign of life, or made no progress, within its deadline."""

    exit_code = 76


class Interrupted(GppoError):  # noqa: N818 - nothing is wrong
    """SIGTERM came; a checkpoint was saved."""

    exit_code = 143
