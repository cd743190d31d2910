"""Whole training steps: bit for bit what their pieces give without graphs, whatever the user changes in between."""

import copy
import gc
import weakref

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import cgpass
from tests.usage import programs
from tests.usage.programs import MLP, Adapted, AssignedBuffer, Checkpointed

STEPS = 10


class Training:
    """A module with an optimizer and a step; the values that a user sees of each."""

    def __init__(self, session, make=MLP, optimizer=None, loss_fn=None, scale=None, **settings):
        self.session, self.scaler = session, None
        if scale is not None:
            scaler = torch.amp.GradScaler(session.device.type, scale, growth_interval=2)
            settings["scaler"] = self.scaler = scaler
        self.module = session.module(make)
        made = optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01, fused=True))
        self.optimizer = made(self.module.parameters())
        self.loss_fn = loss_fn(self.module) if loss_fn else lambda x: self.module(x).square().mean()
        self.step = cgpass.train_step(
            self.loss_fn, self.optimizer, options=session.options, **settings
        )
        self.values = []

    def run(self, *batch, **named):
        self.values.append(self.step(*batch, **named))
        if self.step.grad_norm is not None:
            self.values.append(self.step.grad_norm)

    def found(self):
        """Everything, copied at the end: what was handed out earlier must not have changed."""
        values = pytree.tree_leaves(self.values)
        values = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
        values += programs.state(self.module)
        values += [self.scaler.get_scale()] if self.scaler else []
        optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        for optimizer in optimizers:
            for state in optimizer.state.values():
                values += [v.clone() if isinstance(v, torch.Tensor) else v for v in state.values()]
        return values


def use(*, whole=STEPS - 1, every=None, change=None, shape=(4, 8), **settings):
    """A program of a training, with something done before a step."""

    def program(session):
        training = Training(session, **settings)
        for number, batch in enumerate(session.batches(*shape, count=STEPS)):
            if change is not None and number == 5:
                change(training)
            if every is not None:
                every(training, number)
            training.run(batch)
        program.step = training.step
        return training.found()

    program.whole = whole
    return program


def groups_of(params):
    """Three, one of which has no parameters."""
    params = list(params)
    first, second = {"params": params[:2], "lr": 0.02}, {"params": params[2:], "weight_decay": 0.1}
    return torch.optim.AdamW([first, second, {"params": []}], lr=0.01, fused=True)


def two_optimizers(params):
    params = list(params)
    other = torch.optim.SGD(params[2:], lr=0.1, momentum=0.9, fused=True)
    return [torch.optim.AdamW(params[:2], lr=0.01, fused=True), other]


def sgd(momentum=0.0):
    return lambda params: torch.optim.SGD(params, lr=0.1, momentum=momentum, fused=True)


def schedule(name, begin=0, **settings):
    def every(training, number):
        if number == begin:
            cls = getattr(torch.optim.lr_scheduler, name)
            training.schedule = cls(training.optimizer, **settings)
        elif number > begin:
            training.schedule.step()

    return every


def note_versions(training, _):
    """Saved tensors are checked by these: they advance as they do in pieces."""
    training.values += [p._version for p in training.module.parameters()]


def swap_data(training):
    for parameter in training.module.parameters():
        parameter.data = parameter.data.clone() * 0.5


def evaluate(training, number):
    if number % 3 == 2:
        training.module.eval()
        with torch.no_grad():
            training.values.append(training.loss_fn(training.session.randn(4, 8)))
        training.module.train()


class Branches(nn.Module):
    """A parameter that no gradient comes to."""

    def __init__(self):
        super().__init__()
        self.used = MLP()
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


def with_results(module):
    def loss_fn(x):
        out = module(x)
        loss = out.square().mean()
        return loss, {"loss": loss.detach(), "more": [out, out * 2, None, "text"]}

    return loss_fn


def assign_parameters(training):
    state = {name: value.clone() * 0.5 for name, value in training.module.state_dict().items()}
    training.module.load_state_dict(state, assign=True)


def steps_by_hand(training, number):
    if number % 4 == 3:
        training.loss_fn(training.session.randn(4, 8)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


def toggle(training, number):
    next(training.module.parameters()).requires_grad_(number % 3 != 1)


def fused(cls, **settings):
    return lambda params: cls(params, lr=0.01, fused=True, **settings)


def adagrad(params):
    params = list(params)
    return torch.optim.Adagrad(params, lr=0.01, fused=params[0].device.type == "cpu")


def capturable(params):
    """None of those with a fused step; on a GPU alone a graph can hold it."""
    params = list(params)
    return torch.optim.NAdam(params, lr=0.01, capturable=params[0].is_cuda)


def three_alike():
    return nn.ParameterList([nn.Parameter(torch.ones(4, 8)) for _ in range(3)])


class Clamped(nn.Module):
    """Writes its parameter in the forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        return x @ self.weight


class Slices(nn.Module):
    """The gradients of the first two are slices of one tensor, and that of the third has its columns in its rows."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.turned = [
            nn.Parameter(tensor)
            for tensor in (
                torch.randn(8, 64)[:, :33],
                torch.randn(8, 64)[:, :31],
                torch.randn(64, 8)[:, :3].t(),
            )
        ]

    def forward(self, x):
        return x @ torch.cat([self.left, self.right], 1) @ self.turned.t()


SPARSE = {
    "make": lambda: nn.Embedding(16, 8, sparse=True),
    "loss_fn": lambda m: lambda x: m((x.abs() * 4).long().clamp(max=15)).square().mean(),
}


class SavedGradient(torch.autograd.Function):
    """The gradient is what the forward returned, which clipping must not write."""

    @staticmethod
    def forward(ctx, x, weight):
        y = (x @ x.t() @ x).softmax(-1)
        ctx.save_for_backward(y)
        return y * weight, y

    @staticmethod
    def backward(ctx, grad, _):
        return None, ctx.saved_tensors[0]


def saved_gradient(module):
    def loss_fn(x):
        out, y = SavedGradient.apply(x, module[0])
        return out.sum(), y

    return loss_fn


class Loss(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x).square().mean()


def penalised_by_func(module):
    def loss_fn(x):
        gradient = torch.func.grad(lambda x: module(x).sum())(x)
        return module(x).square().mean() + gradient.square().sum()

    return loss_fn


class Gpt(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.head.weight = self.tokens.weight
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.feed = nn.Sequential(
            nn.RMSNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1)
        )

    def forward(self, x):
        ids = (x[:, :16].abs() * 16).long().clamp(max=31)
        x = self.tokens(ids)
        q, k, v = self.qkv(self.norm(x)).view(-1, 16, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x + self.feed(x)).flatten(0, 1), ids.flatten())


class Resnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 32)
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x):
        x = self.patches(x.view(-1, 3, 16, 16))
        x = self.head((x + self.body(x)).mean((2, 3)))
        return F.cross_entropy(x, torch.arange(len(x), device=x.device))


def with_autocast(module):
    def loss_fn(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return module(x)

    return loss_fn


def of_family(make):
    return use(
        make=make,
        loss_fn=with_autocast,
        optimizer=groups_of,
        every=schedule("LambdaLR", lr_lambda=lambda step: 1 / (1 + step)),
        max_norm=0.1,
        shape=(2, 768),
    )


USES = {
    "gpt": of_family(Gpt),
    "resnet": of_family(Resnet),
    "plain": use(),
    "two optimizers": use(optimizer=two_optimizers, max_norm=1.0),
    "momentum that changes": use(every=schedule("OneCycleLR", max_lr=0.1, total_steps=20), whole=0),
    "evaluation": use(every=evaluate),
    "versions": use(every=note_versions),
    "sparse gradients": use(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1), whole=0, **SPARSE
    ),
    "parameters that are slices": use(make=Slices, max_norm=0.1),
    "unused parameters": use(make=Branches, max_norm=1.0),
    "checkpointing": use(make=Checkpointed),
    "adapters": use(make=Adapted),
    "a new buffer in each step": use(make=AssignedBuffer),
    "parameters replaced": use(change=assign_parameters, whole=4),
    "data swapped in every step": use(every=lambda training, _: swap_data(training)),
    "steps by hand": use(every=steps_by_hand),
    "frozen now and then": use(every=toggle, whole=None),
    "adagrad": use(optimizer=adagrad, whole=0),
    "capturable": use(optimizer=capturable, max_norm=1.0, whole=None),
    "bfloat16": use(
        make=lambda: MLP().bfloat16(),
        loss_fn=lambda m: lambda x: m(x.bfloat16()).float().square().mean(),
        max_norm=1.0,
    ),
    "a number that stays on the device": use(
        loss_fn=lambda m: lambda x: m(x).square().mean() * x.sum().item()
    ),
    "a loss with a dimension": use(loss_fn=lambda m: lambda x: m(x).square().mean().reshape(1)),
    "gradients that are constants": use(
        loss_fn=lambda m: lambda x: sum(p.sum() for p in m.parameters()) + x.sum()
    ),
    "a weight that the forward clamps": use(make=Clamped),
    "a gradient that is a result": use(
        make=lambda: three_alike()[:1], loss_fn=saved_gradient, max_norm=0.1
    ),
    "a gradient penalty": use(loss_fn=penalised_by_func),
    "results beside the loss": use(loss_fn=with_results),
    "an input as a result": use(loss_fn=lambda m: lambda x: (m(x).square().mean(), x), whole=0),
    "a compiled module as the loss": use(loss_fn=lambda m: torch.compile(Loss(m))),
    "a schedule of one cycle": use(
        every=schedule("OneCycleLR", begin=3, max_lr=0.1, total_steps=20, cycle_momentum=False),
        whole=STEPS - 2,  # it brings numbers of its own
    ),
    "one gradient for several": use(
        make=three_alike, loss_fn=lambda m: lambda x: ((m[0] + m[1] + m[2]) * x).sum(), max_norm=0.1
    ),
}


# torch 2.11 instantiates autograd's functions while it traces them
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("name", USES)
def test_uses(way, name):
    check(way, USES[name])


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_uses_with_inductor(way, name):
    if way.device.type == "cpu":  # on CUDA it is a way of its own
        check(way, USES[name], compiler="inductor")


def check(way, program, **options):
    compared(way, program, **options)
    step = program.step
    assert step.calls == STEPS
    if program.whole is not None:
        assert step.whole_calls == program.whole, step.explain()


def compared(way, program, **options):
    plain = way.run(program, **options | {"driver": "none"})
    found = programs.differences(way.run(program, **options), plain)
    assert not found, found[:5]


def test_it_replays(way):
    """A step holds none of its results itself: nothing is copied out of the graph's memory."""
    with programs.counted() as counters:
        training = Training(way.session(), max_norm=1.0)
        for batch in training.session.batches(4, 8, count=STEPS):
            training.step(batch)
    assert counters["recordings"] == 1
    assert counters["rescued_bytes"] == 0
    assert counters["replays"] == STEPS - 2
    assert counters["plain_calls"] == 0


def test_numbers_are_those_of_a_loop_written_by_hand(way):
    def by_hand(session):
        module, call = session.compiled(MLP)
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=torch.tensor(0.01, device=session.device), fused=True
        )
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=STEPS)):
            optimizer.param_groups[0]["lr"].fill_(0.01 * (number + 1))
            loss = call(batch).square().mean()
            loss.backward()
            values.append(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        return values + programs.state(module)

    def whole(session):
        training = Training(session, max_norm=0.5)
        for number, batch in enumerate(session.batches(4, 8, count=STEPS)):
            training.optimizer.param_groups[0]["lr"] = 0.01 * (number + 1)
            training.run(batch)
            training.values[-2:] = reversed(training.values[-2:])
        return [*training.values, *programs.state(training.module)]

    by_hand_values, ours = way.run(by_hand, driver="none"), way.run(whole)
    for a, b in zip(by_hand_values, ours, strict=True):
        torch.testing.assert_close(a, b)


def scaled(session, *, max_norm):
    training = Training(session, scale=2.0**10, max_norm=max_norm)
    for number, batch in enumerate(session.batches(4, 8, count=STEPS)):
        if number in (3, 6):
            batch[0, 0] = float("inf")
        training.run(batch)
        training.values.append(training.scaler._scale.clone())
    assert training.step.whole_calls == (0 if session.options["driver"] == "none" else STEPS - 1), (
        training.step.explain()
    )
    return training.found()


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_scaler_that_skips_steps(way, max_norm):
    compared(way, lambda session: scaled(session, max_norm=max_norm))


def arguments(session):
    module = session.module(MLP)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def loss_fn(batch, *, scale=1.0, squared=True):
        out = module(batch["x"]) * scale
        more = {"twice": [batch["y"][0] * 2, 3]}
        return (out.square().mean() if squared else out.abs().mean()), more

    step = cgpass.train_step(loss_fn, optimizer, options=session.options)
    values = []
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        given = {"x": batch, "y": (batch, number)}
        loss, more = step(given, scale=1.0 + number % 2, squared=number % 3 > 0)
        values += [loss, more["twice"][0]]
    return values + programs.state(module)


def sizes(session):
    training = Training(session)
    for rows in (4, 6, 4, 8, 6, 4, 8, 8, 6, 4):
        training.run(session.randn(rows, 8))
    return training.found()


def copied(session):
    """A copy of module and optimizer goes its own way; a step itself is none to copy."""
    training = Training(session, max_norm=1.0)
    batches = session.batches(4, 8, count=STEPS)
    for batch in batches[:5]:
        training.run(batch)
    for way in (copy.copy, copy.deepcopy):
        with pytest.raises(cgpass.errors.InputError, match="can't be copied or pickled"):
            way(training.step)
    module, optimizer = copy.deepcopy((training.module, training.optimizer))
    other = cgpass.train_step(lambda x: module(x).abs().mean(), optimizer, options=session.options)
    for batch in batches[5:]:
        training.run(batch)
        training.values.append(other(batch))
    assert other.whole_calls in (0, 4)
    return [*training.found(), *programs.state(module)]


def raising(session):
    """A step that raises leaves everything as it was, and is one graph in the next call."""

    def loss_of(module):
        def loss_fn(x, *, bad):
            if bad:
                raise ValueError("bad")
            return module(x).square().mean()

        return loss_fn

    training = Training(session, loss_fn=loss_of)
    for number, batch in enumerate(session.batches(4, 8, count=STEPS)):
        if number in (0, 5):
            before = programs.state(training.module)
            with pytest.raises(ValueError, match="bad"):
                training.step(batch, bad=True)
            with pytest.raises(Exception, match=r"shape|size"):
                training.step(session.randn(4, 7), bad=False)
            assert all(map(torch.equal, before, programs.state(training.module)))
            assert not programs.gradients(training.module)
        training.run(batch, bad=False)
    if session.options["driver"] != "none":
        step = training.step
        assert step.whole_calls == STEPS - 1, step.explain()
        assert step.in_pieces == {"the first call of a variant": 1, "the call raised an error": 4}
        assert step.later_calls == STEPS - 1
    return training.found()


def test_results_are_the_users_own(way):
    """Losses and norms of all steps are held, and are what they were."""

    def held(session):
        training = Training(session, max_norm=1.0)
        copies = []
        for batch in session.batches(4, 8, count=STEPS):
            training.run(batch)
            copies += [value.clone() for value in training.values[-2:]]
        assert all(map(torch.equal, copies, training.values))
        return training.found()

    compared(way, held)


def test_sparse_gradients_beside_results_that_are_copied(way):
    compared(way, USES["sparse gradients"], outputs="owned")


def adversaries(session):
    """Each step freezes the other's module, which its loss goes through."""
    made, judge = session.module(MLP), session.module(MLP)
    optimizers = [fused(torch.optim.AdamW)(m.parameters()) for m in (made, judge)]
    judging = cgpass.train_step(
        lambda x: (judge(x) - 1).square().mean() + judge(made(x).detach()).square().mean(),
        optimizers[1],
        options=session.options,
    )
    making = cgpass.train_step(
        lambda x: (judge(made(x)) - 1).square().mean(), optimizers[0], options=session.options
    )
    values = []
    for batch in session.batches(4, 8, count=STEPS):
        values.append(judging(batch))
        judge.requires_grad_(False)
        values.append(making(batch))
        judge.requires_grad_(True)
    if session.options["driver"] != "none":
        assert judging.whole_calls == making.whole_calls == STEPS - 1
    return values + programs.state(made) + programs.state(judge)


def fed_back(session):
    training = Training(
        session, loss_fn=lambda m: lambda x, h: (m(x + h).square().mean(), m(x + h))
    )
    hidden = session.randn(4, 8)
    for batch in session.batches(4, 8, count=STEPS):
        loss, hidden = training.step(batch, hidden)
        training.values += [loss, hidden]
    return training.found()


PROGRAMS = (arguments, sizes, raising, copied, adversaries, fed_back)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(way, program):
    compared(way, program)


def test_a_dropped_step_frees_what_it_had(way):
    def program(session):
        training = Training(session)
        for batch in session.batches(4, 8, count=5):
            training.run(batch)
        refs.append(weakref.ref(next(training.module.parameters())))
        refs.append(weakref.ref(next(iter(training.step._variants), training.step)))
        return []

    refs = []
    way.run(program)
    gc.collect()  # the step, which has Dynamo forget what it compiled
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_explain_and_what_is_recorded(way):
    """The plan of a small step: no operator beside those of forward, backward, clipping and AdamW."""
    if way.driver != "simulated":
        pytest.skip("the tape is the simulated driver's")
    program = use(make=lambda: nn.Linear(8, 8), max_norm=1.0, change=swap_data)
    way.run(program)
    step = program.step
    assert_expected_inline(
        step.explain(),
        """\
train_step of Training.__init__.<locals>.<lambda>: 10 calls, 9 as a whole, 1 in pieces
  1 in pieces: the first call of a variant
  one graph, recorded 2 times and replayed 7 times: reads 2 parameters and 7 tensors of the optimizer in place, copies 1 input
  1 recording: the first call with this value or layout of what the optimizer reads, or its place
  results or gradients still referenced were copied 5 times (40 bytes); drop them before the next call to save this""",
    )
    (whole,) = step._variants.values()
    calls = [str(call[0]) for call in whole._runner.table.all()[0].graph._calls]
    assert_expected_inline(
        " ".join(name.removeprefix("aten.") for name in calls if name.startswith("aten.")),
        """t.default addmm.default pow.Tensor_Scalar mean.default ones_like.default expand.default div.Scalar pow.Tensor_Scalar mul.Scalar mul.Tensor t.default mm.default t.default sum.dim_IntList view.default t.default _foreach_norm.Scalar stack.default linalg_vector_norm.default add.Tensor reciprocal.default mul.Tensor clamp.default _foreach_mul_.Tensor _foreach_add_.Scalar _fused_adamw_.tensor_lr""",
    )
