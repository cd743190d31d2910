"""Optimizers, gradient scalers and several models in one step."""

import copy
import itertools

import pytest
import torch
from torch import nn

from tests.usage import programs
from tests.usage.programs import MLP, assert_replays


def scaled(session):
    """Two steps whose gradients are not finite are skipped, and the scale falls."""
    module, call = session.compiled(MLP)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(session.device.type, init_scale=1024.0, growth_interval=2)
    values = []
    for number, batch in enumerate(session.batches(4, 8, count=10)):
        if number in (3, 6):
            batch[0, 0] = float("inf")
        optimizer.zero_grad()
        with torch.autocast(session.device.type, torch.bfloat16):
            out = call(batch)
            loss = out.float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        values.append(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        values += [out.detach(), scaler.get_scale()]
    return values + programs.state(module)


def test_a_gradient_scaler_that_skips_steps(way):
    assert_replays(way.compare(scaled))
    scales = [value for value in way.run(scaled) if isinstance(value, float)]
    assert any(after < before for before, after in itertools.pairwise(scales))


def adversaries(session):
    """A generator and a discriminator: each learns through, or from, the other's results."""
    maker, make = session.compiled(MLP)
    judge = session.module(lambda: nn.Sequential(MLP(), nn.Linear(8, 1)))
    verdict = session.compile(judge)
    learn_to_make = torch.optim.Adam(maker.parameters(), lr=0.01)
    learn_to_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
    values = []
    for real in session.batches(4, 8, count=6):
        fake = make(session.randn(4, 8))
        learn_to_judge.zero_grad()
        loss = nn.functional.softplus(-verdict(real)).mean()
        loss = loss + nn.functional.softplus(verdict(fake.detach())).mean()
        loss.backward()
        learn_to_judge.step()
        learn_to_make.zero_grad()
        trick = nn.functional.softplus(-verdict(fake)).mean()
        trick.backward()
        learn_to_make.step()
        values += [loss.detach(), trick.detach(), fake.detach()]
    return values + programs.state(maker) + programs.state(judge)


def test_two_models_that_train_against_each_other(way):
    assert_replays(way.compare(adversaries))


def test_a_teacher_that_follows_its_student(way):
    def program(session):
        student, learn = session.compiled(MLP)
        teacher = copy.deepcopy(student).requires_grad_(False)
        teach = session.compile(teacher)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        values = []
        for batch in session.batches(4, 8, count=8):
            with torch.no_grad():
                target = teach(batch * 0.9)
            loss = (learn(batch) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
            values += [target, loss.detach()]
        return values + programs.state(teacher)

    assert_replays(way.compare(program))


def test_an_optimizer_that_calls_the_model_itself(way):
    def program(session):
        module, call = session.compiled(MLP)
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)
        values = []
        for batch in session.batches(4, 8, count=4):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = call(batch).square().mean()
                loss.backward()
                values.append(loss.detach())
                return loss

            optimizer.step(closure)
        return values + programs.state(module)

    assert_replays(way.compare(program))


def test_two_backwards_a_step_at_disturbed_parameters(way):
    def program(session):
        module, call = session.compiled(MLP)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        values = []
        for batch in session.batches(4, 8, count=6):
            call(batch).square().mean().backward()
            uphill = [p.grad for p in module.parameters()]
            with torch.no_grad():
                for p, g in zip(module.parameters(), uphill, strict=True):
                    p.add_(g, alpha=0.05)
            optimizer.zero_grad()
            call(batch).square().mean().backward()
            with torch.no_grad():
                for p, g in zip(module.parameters(), uphill, strict=True):
                    p.sub_(g, alpha=0.05)
            optimizer.step()
            optimizer.zero_grad()
            values += uphill
        return values + programs.state(module)

    assert_replays(way.compare(program))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ],
    ids=["adamw", "amsgrad", "momentum"],
)
def test_a_compiled_optimizer_step(way, make):
    def program(session):
        module, call = session.compiled(MLP)
        optimizer = make(module.parameters())
        step = session.compile(optimizer.step)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=8)):
            call(batch).square().mean().backward()
            step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            values += programs.state(module)
        for moments in optimizer.state.values():
            values += [v for v in moments.values() if isinstance(v, torch.Tensor)]
        return values

    counters = way.compare(program, on_skip="silent")
    assert counters["replays"] > 0, counters


def test_a_compiled_optimizer_step_with_a_rate_that_falls(way):
    def program(session):
        module, call = session.compiled(MLP)
        rate = session.tensor(0.1)
        optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = session.compile(optimizer.step)
        for batch in session.batches(4, 8, count=8):
            call(batch).square().mean().backward()
            step()
            optimizer.zero_grad()
            schedule.step()
        return [*programs.state(module), optimizer.param_groups[0]["lr"]]

    way.compare(program, on_skip="silent")


def test_a_step_compiled_as_a_whole(way):
    def program(session):
        module = session.module(MLP)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(batch):
            loss = module(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = session.compile(step)
        losses = [step(batch) for batch in session.batches(4, 8, count=8)]
        return losses + programs.state(module)

    way.compare(program, on_skip="silent")
