"""Kernels of a trace belong to the partition that launched them."""

import json

from cgpass.report.kernels import events_of, launches, range_name


def around(key, start, end, tid=1):
    name = range_name(*key)
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "tid": tid}


def launch(number, at, name="cudaLaunchKernel", tid=1):
    args = {"correlation": number}
    return {"cat": "cuda_runtime", "name": name, "ts": at, "tid": tid, "args": args}


def work(number, dur=2.0, cat="kernel"):
    return {"cat": cat, "name": "k", "ts": 500, "dur": dur, "args": {"correlation": number}}


def test_kernels_belong_to_the_range_around_their_launch():
    found = launches(
        [
            around((0, "captured_0"), 0, 10),
            around((0, "eager_1"), 10, 20),
            launch(1, 5, "cudaGraphLaunch"),
            launch(2, 15),
            launch(3, 25),
            *[work(1)] * 3,
            work(1, 4.0, "gpu_memcpy"),
            work(2),
            work(3),
            {"name": "process_name", "ph": "M"},
        ]
    )
    assert found.kernels == {(0, "captured_0"): 3, (0, "eager_1"): 1}
    assert found.in_graphs == {(0, "captured_0"): 3, (0, "eager_1"): 0}
    assert (found.gpu_us, found.gpu_us_in_graphs) == (14.0, 10.0)
    assert found.gpu_share == 10 / 14


def test_what_prepares_a_replay_is_none_of_the_partitions_kernels():
    key = (0, "captured_0")
    found = launches(
        [
            around(key, 0, 10),
            launch(1, 2),
            launch(2, 5, "cudaGraphLaunch"),
            around(key, 20, 30),
            launch(3, 25),
            work(1, 1.0),
            *[work(2)] * 2,
            work(3),
        ]
    )
    assert (found.kernels, found.in_graphs) == ({key: 3}, {key: 2})
    assert (found.gpu_us, found.gpu_us_in_graphs) == (7.0, 4.0)


def test_the_innermost_range_counts_and_threads_are_told_apart():
    found = launches(
        [
            around((0, "captured_0"), 0, 100),
            around((0, "eager_1"), 10, 20),
            around((1, "captured_0"), 0, 100, tid=2),
            launch(1, 15),
            launch(2, 15, "cuGraphLaunch", tid=2),
            work(1),
            work(2),
        ]
    )
    assert found.kernels == {(0, "eager_1"): 1, (1, "captured_0"): 1}
    assert found.in_graphs[1, "captured_0"] == 1


def test_nothing_ran_on_the_device():
    found = launches([around((0, ""), 0, 1)])
    assert (found.kernels, found.gpu_share) == ({}, None)


def test_events_are_read_from_what_a_profiler_exports():
    class Profile:
        def export_chrome_trace(self, path):
            with open(path, "w") as file:
                json.dump({"traceEvents": [work(1)]}, file)

    assert events_of(Profile()) == [work(1)]
