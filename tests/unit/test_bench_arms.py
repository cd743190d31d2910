"""Arms of the benchmark: which there are, and what the leanest one does."""

from types import SimpleNamespace

import bench
import pytest
import torch
from benchlib import arms


def job_arms(*more):
    found = bench.jobs(bench.parse(["--models", "gpt2", *more]), "folder")
    return [name for job in found for name in job.arms]


def test_times_are_measured_of_all_arms_and_memory_of_those_that_differ_in_it():
    assert job_arms() == list(arms.NAMES)
    assert job_arms("--memory") == [name for name in arms.NAMES if name != "cgpass-lean"]
    assert job_arms("--inference") == ["default", "reduce-overhead", "cgpass"]
    assert job_arms("--memory", "--arms", "cgpass,cgpass-lean") == ["cgpass", "cgpass-lean"]


class Module(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize("name", ["cgpass", "cgpass-lean"])
def test_the_leanest_arm_sets_gradients_directly_in_the_thread_that_calls_the_backward(name):
    spec = SimpleNamespace(regions=None, autocast=False)
    workload = SimpleNamespace(
        spec=spec,
        device=torch.device("cpu"),
        instance=lambda _: Module(4, 4),
        inference=False,
    )
    arm = arms.make(name, workload)
    is_lean = name == "cgpass-lean"
    options = arms.compile_settings(name, workload.device)["options"]
    assert (options.get("parameter_grads") == "direct") == is_lean
    threads = []

    class Loss:
        def backward(self):
            threads.append(torch._C._is_multithreading_enabled())

        def detach(self):
            return "detached"

    arm._call = lambda **_: Loss()
    assert arm.forward_backward({}) == "detached"
    assert threads == [not is_lean]
    assert torch._C._is_multithreading_enabled()
