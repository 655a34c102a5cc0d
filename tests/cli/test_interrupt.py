"""What a signal does while something is under way."""

from __future__ import annotations

import os
import signal

import pytest

from paceline.cli._interrupt import told_to_stop


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_the_second_does_not(signum: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with told_to_stop() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signum)
        assert stop.is_set()
        assert stop.exit_code == 128 + signum
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signum)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
