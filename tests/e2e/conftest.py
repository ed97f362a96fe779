"""What all tests with real processes need."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_can_be_sent() -> None:
    """Tests that run in the background ignore SIGINT, and so would the programs that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
