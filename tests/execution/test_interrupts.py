"""Ctrl-C is noted where it would do harm, ends what may be ended, and is never forgotten."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from paceline.execution.interrupts import interruptible, pending, uninterrupted


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_comes_when_the_work_is_done() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            ctrl_c()
            assert pending()
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert not pending()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("before", [False, True])
def test_a_stretch_may_be_ended_and_what_follows_may_not(before: bool) -> None:
    done = []

    def stretch() -> None:
        if before:
            ctrl_c()
        with interruptible():
            ctrl_c()
            done.append("never")

    def work() -> None:
        with uninterrupted():
            with pytest.raises(KeyboardInterrupt):
                stretch()
            assert not pending()
            ctrl_c()
            done.append("cleared up")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["cleared up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_within_another_leaves_it_to_the_outer() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            with interruptible(), uninterrupted():
                pass
            with uninterrupted():
                ctrl_c()
            done.append(pending())

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]


def test_by_itself_a_stretch_is_nothing_and_other_threads_have_no_signals() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        ctrl_c()
    seen: list[bool] = []

    def elsewhere() -> None:
        with uninterrupted(), interruptible():
            seen.append(pending())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [False]
