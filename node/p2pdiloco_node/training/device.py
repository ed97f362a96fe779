"""The one thing about devices that is known without torch: what a person is told where one is missing."""

from __future__ import annotations

from p2pdiloco.errors import OperatorError


class DeviceMissing(OperatorError):
    """The device that the settings name is not on this machine; trying again does not bring it."""

    def __init__(self, wanted: str, why: str, instead: str = "use auto or cpu") -> None:
        super().__init__(f"{wanted}: {why}; {instead}.", 6)
