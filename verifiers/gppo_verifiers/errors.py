"""What can go wrong with the judge itself; a bad answer or a failing verifier is a `Verdict`, never an error."""


class WorkerStartError(Exception):
    """No verifier worker can be started; the message says why."""


class ServiceError(Exception):
    """A verifier service cannot be started, or none can be reached; the message says why."""
