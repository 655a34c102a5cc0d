"""Memory, and stops, as a process sees them itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from paceline.bench.peak_memory import PeakMemory, resident_bytes


def test_the_peak_is_seen() -> None:
    before = resident_bytes()
    with PeakMemory() as memory:
        block = bytearray(os.urandom(1 << 20) * 64)
        time.sleep(0.3)
        del block
    assert memory.peak - before > 32 << 20


@pytest.mark.skipif(os.name != "posix", reason="needs SIGSTOP")
def test_a_stop_is_seen() -> None:
    code = (
        "import sys; from paceline.bench.peak_memory import PeakMemory\n"
        "with PeakMemory() as memory:\n    print('on', flush=True); sys.stdin.read()\n"
        "print(memory.stood_still_s)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        told, _ = process.communicate("", timeout=60)
    assert float(told) > 1.0
