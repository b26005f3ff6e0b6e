"""What can go wrong with the judge itself; a bad answer or a failing verifier is a `Verdict`, never an error."""


class WorkerStartError(Exception):
    """No verifier worker can be started; the message says why."""
