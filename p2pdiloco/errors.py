"""Errors by whose fault they are; the class decides what happens next.

An `AssertionError` is our own fault: the process crashes and its supervisor restarts it.
"""

from p2pdiloco.exit_codes import FILES


class P2PDiLoCoError(Exception):
    """Something failed."""


class PeerError(P2PDiLoCoError):
    """A peer sent something it must not send: drop it and lower the peer's score."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class TransportError(P2PDiLoCoError):
    """The network failed: nobody's fault, try again with back-off."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OperatorError(P2PDiLoCoError):
    """The person at this machine can mend it: one sentence says how; no traceback.

    `exit_code`: one of exit_codes.py, documented in docs/exit-codes.md.
    """

    def __init__(self, message: str, exit_code: int = FILES) -> None:
        super().__init__(message)
        self.exit_code = exit_code
