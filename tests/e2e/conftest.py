"""What all tests with real processes need."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_can_be_sent() -> None:
    """Whoever runs the tests in the background ignores SIGINT, and the programs that they start would, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
