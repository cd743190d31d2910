"""Skips what this machine has no CUDA devices for; keeps one test's options from the next. Needs a C++ compiler."""

import atexit
import collections
import gc
import importlib
import logging
import os
import warnings

import pytest
import torch

from cgpass import options, telemetry
from cgpass.runtime import native
from cgpass.torch_private import frames

SCRIPTS_OWN = {"CGPASS_VENV"}


def pytest_sessionstart(session):
    """Most of the time goes to torch.compile: a sixth of it to collecting torch's own modules, and to logs for nobody."""
    config = session.config
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the workers do it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own of itself
        for name in (
            "torch._dynamo",
            "torch._functorch.aot_autograd",
            "torch._inductor.compile_fx",
        ):
            importlib.import_module(name)
    gc.set_threshold(50_000, 20, 100)
    compile_for_nobodys_logs()
    log_to_the_root_alone()
    if not torch.cuda.is_available():
        expect_no_devices()
    if not native.loader.wait():
        raise pytest.UsageError(f"tests need cgpass's native code: {native.loader.why_not}")


def compile_for_nobodys_logs():
    """Leaves out what torch.compile does beside each compilation: an eighth of the whole run."""
    importlib.import_module("torch._dynamo.config").run_gc_after_compile = False
    # builds three libraries to try which instructions there are
    importlib.import_module("torch._inductor.config").cpp.vec_isa_ok = True
    guards = importlib.import_module("torch._dynamo.guards")
    guards.profile_guard_manager = lambda *args: 0.0  # flushes caches to time a call for a log
    trace = logging.getLogger("torch.__trace")  # renders every graph where it has a handler
    trace.handlers.clear()
    trace.addHandler = lambda handler: None  # pytest's own, put there in each phase of a test


def log_to_the_root_alone():
    """Leaves out pytest's walk over all loggers, in each phase of each test, for torch's many that do not propagate."""

    def enter(self):
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = logging.root.level
            logging.root.setLevel(min(self.orig_level, self.level))
        logging.root.addHandler(self.handler)
        return self.handler

    def leave(self, *error):
        if self.level is not None:
            logging.root.setLevel(self.orig_level)
        logging.root.removeHandler(self.handler)

    catching_logs = importlib.import_module("_pytest.logging").catching_logs
    catching_logs.__enter__, catching_logs.__exit__ = enter, leave


def expect_no_devices():
    """Leaves out what each `manual_seed` notes, with its stack, for devices that might come, and the search for them.

    Autograd's engine decides at the first backward for which devices it has threads; fake CUDA tensors make it count
    one, and then no process that is forked could run a backward.
    """
    torch.zeros(1, requires_grad=True).sum().backward()
    torch.cuda._cached_device_count = 0
    for backend in (torch.cuda, torch.xpu, torch.mtia):
        backend.manual_seed_all = lambda seed: None


def pytest_collection_finish(session):
    keep_what_there_is()
    atexit.register(gc.unfreeze)  # some extension modules tell of what is left then


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            torch.compiler.reset()  # what it keeps and is frozen would be in all later summaries
            keep_what_there_is()


def keep_what_there_is():
    """Frees what one file left behind, so that no later one pays for it; what stays is not walked over again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        needed = 1 if item.get_closest_marker("gpu") else 0
        if marker := item.get_closest_marker("multigpu"):
            needed = marker.args[0]
        if needed > found:
            reason = f"needs {needed} CUDA device(s), found {found}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    """A line for each reason to skip tests, and one for all that lack a device."""
    for reason, count in skipped(terminalreporter.stats.get("skipped", ())).items():
        terminalreporter.write_line(f"{count} test{'s' * (count > 1)} skipped: {reason}")


def skipped(reports):
    """Counts of skipped tests, by reason."""
    reasons = (report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    return collections.Counter(
        "need a CUDA device" if reason.endswith("CUDA device(s), found 0") else reason
        for reason in reasons
    )


@pytest.fixture(autouse=True)
def builtin_defaults(monkeypatch):
    """Every test starts from the built-in options, whatever the shell or a test before it set."""
    for name in set(os.environ) - SCRIPTS_OWN:
        if name.startswith("CGPASS_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(options, "_overrides", {})


@pytest.fixture
def counted_alone(monkeypatch):
    """Nothing that was compiled before is counted."""
    monkeypatch.setattr(telemetry, "registry", telemetry.Registry())


@pytest.fixture
def process_group():
    """A group of this process alone; a test may end it."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def nothing_compiled_stays():
    """Each test of a file compiles anew, and is alone in summaries."""
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def autocast_cache():
    """A signal may end the block that turns it off between two lines of its end: other threads would compile anew."""
    yield
    torch.set_autocast_cache_enabled(True)


@pytest.fixture(autouse=True)
def no_graph_breaks_of_others():
    """Summaries tell of all that the process met."""
    frames._graph_breaks.clear()
