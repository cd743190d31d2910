"""Nothing is destroyed while a capture runs, and no garbage collected."""

import gc
import threading

from cgpass.runtime.capturing import (
    Capture,
    Pause,
    is_capturing_here,
    when_no_capture_runs,
)


def test_it_waits_for_the_last_capture():
    done = []
    with Capture():
        with Capture():
            when_no_capture_runs(lambda: done.append(1))
        assert is_capturing_here()
        when_no_capture_runs(lambda: done.append(2))
        assert done == []
    assert done == [1, 2]


def test_no_gc_ends_when_the_last_thread_leaves():
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with Pause():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with Pause():
        leave.set()
        thread.join()
        seen.append(gc.isenabled())
    assert seen == [False]
    assert gc.isenabled()


def test_no_gc_leaves_it_off_where_it_was_off():
    gc.disable()
    try:
        with Pause():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
