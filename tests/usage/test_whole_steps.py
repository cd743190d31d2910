"""Whole training steps: bit for bit what their pieces give without graphs, whatever the user changes in between."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import cgpass
from tests.usage import programs
from tests.usage.programs import MLP, SEED, Block, ConvNet, Tied

STEPS = 10


class Training:
    """A module with an optimizer and a step; the values that a user sees of each."""

    def __init__(self, session, make=MLP, optimizer=None, loss_fn=None, **settings):
        self.session = session
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
    params = list(params)
    return torch.optim.AdamW(
        [{"params": params[:2], "lr": 0.02}, {"params": params[2:], "weight_decay": 0.1}],
        lr=0.01,
        fused=True,
    )


def sgd(momentum=0.0):
    return lambda params: torch.optim.SGD(params, lr=0.1, momentum=momentum, fused=True)


def schedule(name, **settings):
    def every(training, number):
        if number == 0:
            cls = getattr(torch.optim.lr_scheduler, name)
            training.schedule = cls(training.optimizer, **settings)
        else:
            training.schedule.step()

    return every


def set_number(name, value):
    def change(training):
        for group in training.optimizer.param_groups:
            group[name] = value

    return change


def load_optimizer(training):
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def assign_model(training):
    state = {name: value.clone() * 0.5 for name, value in training.module.state_dict().items()}
    training.module.load_state_dict(state)


def swap_data(training):
    for parameter in training.module.parameters():
        parameter.data = parameter.data.clone() * 0.5


def new_state_tensor(training):
    state = next(iter(training.optimizer.state.values()))
    state["exp_avg"] = torch.ones_like(state["exp_avg"])


def edit_state(training):
    for state in training.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def freeze(training):
    next(training.module.parameters()).requires_grad_(False)


def add_group(training):
    extra = nn.Parameter(torch.ones(3, device=training.session.device))
    training.optimizer.add_param_group({"params": [extra]})


def gradient_from_before(training):
    for parameter in training.module.parameters():
        parameter.grad = torch.ones_like(parameter)


def evaluate(training, number):
    if number % 3 == 2:
        training.module.eval()
        with torch.no_grad():
            training.values.append(training.loss_fn(training.session.randn(4, 8)))
        training.module.train()


def hook(training):
    first = next(training.module.parameters())
    first.register_hook(lambda grad: grad * 2)


def accumulated_hook(training):
    first = next(training.module.parameters())

    def double(parameter):
        parameter.grad.mul_(2)

    first.register_post_accumulate_grad_hook(double)


def node_hook(training):
    first = next(training.module.parameters())
    training.node = first.expand_as(first).grad_fn.next_functions[0][0]
    training.node.register_hook(lambda *_: None)


def optimizer_hook(training):
    training.optimizer.register_step_post_hook(
        lambda optimizer, *_: optimizer.param_groups[0]["params"][0].data.mul_(0.5)
    )


def average(training, number):
    with torch.no_grad():
        if number == 0:
            training.average = [p.clone() for p in training.module.parameters()]
        for mean, parameter in zip(training.average, training.module.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
        training.values.append(training.average[0].sum())


def stochastic_weight_average(training, number):
    if number == 0:
        training.average = torch.optim.swa_utils.AveragedModel(training.module)
    training.average.update_parameters(training.module)
    training.values.append(next(training.average.parameters()).sum())


def reseed(training):
    torch.manual_seed(SEED)


class Branches(nn.Module):
    """A parameter that no gradient comes to."""

    def __init__(self):
        super().__init__()
        self.used = MLP()
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


class Adapted(nn.Module):
    """A frozen matrix, and two small ones that learn."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Stateful(nn.Module):
    """Keeps something on the Python side."""

    def __init__(self):
        super().__init__()
        self.body = MLP()
        self.previous = None

    def forward(self, x):
        out = self.body(x)
        if self.previous is not None:
            out = out + self.previous
        self.previous = out.detach().mean(0)
        return out


def autocast(module):
    def loss_fn(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            out = module(x)
        return out.float().square().mean()

    return loss_fn


def with_results(module):
    def loss_fn(x):
        out = module(x)
        return out.square().mean(), {"out": out, "twice": out * 2}

    return loss_fn


def image_loss(module):
    return lambda x: module(x.view(4, 3, 8, 8)).square().mean()


def token_loss(module):
    def loss_fn(x):
        ids = (x.abs() * 4).long().clamp(max=15)
        return F.cross_entropy(module(ids).flatten(0, 1), ids.flatten())

    return loss_fn


def two_terms(module):
    def loss_fn(x):
        return module(x).square().mean() + sum(p.square().sum() for p in module.parameters())

    return loss_fn


def nan_now_and_then(module):
    return lambda x: module(x).square().mean() * (x[0, 0].abs() * float("inf")).clamp(max=1e30)


class NewBuffer(nn.Module):
    """Assigns a buffer anew in each call."""

    def __init__(self):
        super().__init__()
        self.body = MLP()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        out = self.body(x) + self.mean
        self.mean = out.detach().mean(0)
        return out


def replace_in_group(training):
    params = training.optimizer.param_groups[0]["params"]
    params[0] = nn.Parameter(torch.ones_like(params[0]))


def clear_state(training):
    training.optimizer.state.clear()


def assign_parameters(training):
    state = {name: value.clone() * 0.5 for name, value in training.module.state_dict().items()}
    training.module.load_state_dict(state, assign=True)


def swap_state_data(training):
    for state in training.optimizer.state.values():
        state["exp_avg"].data = state["exp_avg"].data.clone() * 2


def learning_rates_of_all_types(training, number):
    rates = 0.01, torch.tensor(0.02), 1, torch.tensor(0.5, device=training.session.device)
    training.optimizer.param_groups[0]["lr"] = rates[number % 4]


def swap_in_every_step(training, number):
    swap_data(training)


def steps_by_hand(training, number):
    if number % 4 == 3:
        training.loss_fn(training.session.randn(4, 8)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


def backward_by_hand(training, number):
    if number % 4 == 3:
        training.loss_fn(training.session.randn(4, 8)).backward()


def toggle(training, number):
    next(training.module.parameters()).requires_grad_(number % 3 != 1)


def hook_for_a_while(training, number):
    if number == 4:
        first = next(training.module.parameters())
        training.hook = first.register_hook(lambda grad: grad * 2)
    if number == 6:
        training.hook.remove()


def late_schedule(training, number):
    if number == 5:
        training.schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
    if number > 5:
        training.schedule.step()


def fused(cls, **settings):
    return lambda params: cls(params, lr=0.01, fused=True, **settings)


def three_alike():
    return nn.ParameterList([nn.Parameter(torch.ones(4, 8)) for _ in range(3)])


USES = {
    "plain": use(),
    "clipping": use(max_norm=0.1),
    "groups": use(optimizer=groups_of, max_norm=1.0),
    "sgd": use(optimizer=sgd()),
    "sgd with momentum": use(optimizer=sgd(0.9)),
    "a schedule": use(every=schedule("ExponentialLR", gamma=0.9)),
    "a schedule of groups": use(every=schedule("CosineAnnealingLR", T_max=5), optimizer=groups_of),
    "momentum that changes": use(every=schedule("OneCycleLR", max_lr=0.1, total_steps=20), whole=0),
    "weight decay changes": use(change=set_number("weight_decay", 0.5), whole=STEPS - 2),
    "betas change": use(change=set_number("betas", (0.8, 0.9)), whole=STEPS - 2),
    "eps changes": use(change=set_number("eps", 1e-3), whole=STEPS - 2),
    "maximize": use(change=set_number("maximize", True), whole=STEPS - 2),
    "not fused any more": use(change=set_number("fused", False), whole=4),
    "the learning rate becomes a tensor": use(
        change=lambda t: set_number("lr", torch.tensor(0.5, device=t.session.device))(t)
    ),
    "optimizer loaded": use(change=load_optimizer, whole=STEPS - 2),
    "a state tensor replaced": use(change=new_state_tensor, whole=STEPS - 2),
    "state edited": use(change=edit_state),
    "model loaded": use(change=assign_model),
    "data swapped": use(change=swap_data),
    "frozen": use(change=freeze, whole=None),
    "a new group": use(change=add_group, whole=STEPS - 2),
    "a gradient from before": use(change=gradient_from_before, whole=STEPS - 2),
    "evaluation": use(every=evaluate),
    "a hook": use(change=hook, whole=4),
    "a hook on what was accumulated": use(change=accumulated_hook, whole=4),
    "a hook on the node": use(change=node_hook, whole=4),
    "a hook on the optimizer": use(change=optimizer_hook, whole=4),
    "moving average": use(every=average),
    "stochastic weight average": use(every=stochastic_weight_average),
    "dropout": use(make=lambda: nn.Sequential(MLP(), nn.Dropout(0.5), MLP())),
    "reseeded": use(make=lambda: nn.Sequential(MLP(), nn.Dropout(0.5)), change=reseed),
    "batch norm": use(make=ConvNet, loss_fn=image_loss, shape=(4, 192)),
    "attention": use(make=Block, shape=(2, 4, 16)),
    "tied weights": use(make=Tied, loss_fn=token_loss),
    "unused parameters": use(make=Branches, max_norm=1.0),
    "checkpointing": use(make=Checkpointed),
    "adapters": use(make=Adapted),
    "state on the Python side": use(make=Stateful, whole=STEPS - 2),
    "autocast": use(loss_fn=autocast),
    "results beside the loss": use(loss_fn=with_results),
    "a penalty": use(loss_fn=two_terms),
    "a mode of the module": use(
        make=lambda: nn.Sequential(MLP(), nn.Dropout(0.5)),
        change=lambda t: t.module.eval(),
        whole=STEPS - 2,
    ),
    "accumulated": use(accumulate=3, whole=0),
    "a new buffer in each step": use(make=NewBuffer),
    "a parameter of the optimizer replaced": use(change=replace_in_group, whole=4),
    "state cleared": use(change=clear_state, whole=STEPS - 2),
    "parameters replaced": use(change=assign_parameters, whole=4),
    "data of state swapped": use(change=swap_state_data),
    "compiler reset": use(change=lambda _: torch.compiler.reset(), whole=STEPS - 2),
    "reset": use(change=lambda _: cgpass.reset()),
    "learning rates of all types": use(every=learning_rates_of_all_types),
    "data swapped in every step": use(every=swap_in_every_step),
    "steps by hand": use(every=steps_by_hand),
    "backwards by hand": use(every=backward_by_hand, whole=STEPS - 3),
    "frozen now and then": use(every=toggle, whole=None),
    "a hook for a while": use(every=hook_for_a_while, whole=None),
    "a late schedule": use(every=late_schedule, whole=STEPS - 2),
    "betas as a list": use(change=set_number("betas", [0.5, 0.6]), whole=STEPS - 2),
    "fused and foreach": use(change=set_number("foreach", True), whole=4),
    "a number that is a tensor": use(
        optimizer=sgd(0.9), change=set_number("weight_decay", torch.tensor(0.5)), whole=None
    ),
    "amsgrad": use(optimizer=fused(torch.optim.Adam, amsgrad=True)),
    "adagrad": use(optimizer=fused(torch.optim.Adagrad), whole=0),
    "nesterov": use(optimizer=fused(torch.optim.SGD, momentum=0.9, nesterov=True)),
    "bfloat16": use(
        make=lambda: MLP().bfloat16(),
        loss_fn=lambda m: lambda x: m(x.bfloat16()).float().square().mean(),
        max_norm=1.0,
    ),
    "a loss with a dimension": use(loss_fn=lambda m: lambda x: m(x).square().mean().reshape(1)),
    "gradients that are constants": use(
        loss_fn=lambda m: lambda x: sum(p.sum() for p in m.parameters()) + x.sum()
    ),
    "one gradient for several": use(
        make=three_alike, loss_fn=lambda m: lambda x: ((m[0] + m[1] + m[2]) * x).sum(), max_norm=0.1
    ),
}


@pytest.mark.parametrize("name", USES)
def test_uses(way, name):
    program = USES[name]
    ours = way.run(program)
    step = program.step
    assert step.calls == STEPS
    if program.whole is not None:
        assert step.whole_calls == program.whole, step.explain()
    plain = way.run(program, driver="none")
    assert program.step.whole_calls == 0
    found = programs.differences(ours, plain)
    assert not found, found[:5]


def compared(way, program, **options):
    """The results of a program, which are those without graphs."""
    ours = way.run(program, **options)
    found = programs.differences(ours, way.run(program, **options | {"driver": "none"}))
    assert not found, found[:5]
    return ours


def test_it_replays(way):
    with programs.counted() as counters:
        way.run(USES["plain"])
    assert counters["recordings"] == 1
    assert counters["replays"] == STEPS - 2
    assert counters["plain_calls"] == 0


def test_numbers_are_those_of_a_loop_written_by_hand(way):
    def by_hand(session):
        module, call = session.compiled(MLP)
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=torch.tensor(0.01, device=session.device), fused=True
        )
        values = []
        for batch in session.batches(4, 8, count=STEPS):
            loss = call(batch).square().mean()
            loss.backward()
            values.append(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        return values + programs.state(module)

    def whole(session):
        training = Training(session, max_norm=0.5)
        for batch in session.batches(4, 8, count=STEPS):
            training.run(batch)
            training.values[-2:] = reversed(training.values[-2:])
        return [*training.values, *programs.state(training.module)]

    by_hand_values, ours = way.run(by_hand, driver="none"), way.run(whole)
    for a, b in zip(by_hand_values, ours, strict=True):
        torch.testing.assert_close(a, b)


def scaled(session, *, max_norm):
    scaler = torch.amp.GradScaler(session.device.type, init_scale=2.0**10, growth_interval=2)

    def loss_fn(module):
        return lambda x: module(x).square().mean()

    training = Training(session, loss_fn=loss_fn, scaler=scaler, max_norm=max_norm)
    for number, batch in enumerate(session.batches(4, 8, count=STEPS)):
        if number in (3, 6):
            batch[0, 0] = float("inf")
        training.run(batch)
        training.values.append(scaler._scale.clone())
    assert training.step.whole_calls == (0 if session.options["driver"] == "none" else STEPS - 1), (
        training.step.explain()
    )
    return training.found()


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_scaler_that_skips_steps(way, max_norm):
    compared(way, lambda session: scaled(session, max_norm=max_norm))


def two_optimizers(session):
    module = session.module(lambda: nn.Sequential(MLP(), MLP()))
    adam = torch.optim.AdamW(module[0].parameters(), lr=0.01, fused=True)
    other = torch.optim.SGD(module[1].parameters(), lr=0.1, momentum=0.9, fused=True)
    step = cgpass.train_step(
        lambda x: module(x).square().mean(), [adam, other], max_norm=1.0, options=session.options
    )
    values = [step(batch) for batch in session.batches(4, 8, count=STEPS)]
    assert step.whole_calls in (0, STEPS - 1)
    return values + programs.state(module)


def test_two_optimizers(way):
    compared(way, two_optimizers)


def under_autocast(session):
    training = Training(session, max_norm=0.1)
    for number, batch in enumerate(session.batches(4, 8, count=STEPS)):
        with torch.autocast(session.device.type, torch.bfloat16, enabled=number % 4 == 3):
            training.run(batch)
    return training.found()


def test_autocast_around_some_steps(way):
    compared(way, under_autocast)


def two_steps(session):
    """Of one module and one optimizer."""
    training = Training(session)
    other = cgpass.train_step(
        lambda x: training.module(x).abs().mean(), training.optimizer, options=session.options
    )
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        if number % 3 == 2:
            training.values.append(other(batch))
        else:
            training.run(batch)
    return training.found()


def test_two_steps_of_one_optimizer(way):
    compared(way, two_steps)


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


def test_arguments_of_all_kinds(way):
    compared(way, arguments)


def sizes(session):
    training = Training(session)
    for rows in (4, 6, 4, 8, 6, 4, 8, 8, 6, 4):
        training.run(session.randn(rows, 8))
    return training.found()


def test_sizes_take_turns(way):
    compared(way, sizes)


def resumed(session):
    """Saved in the middle, and gone on with in new objects."""
    first = Training(session, make=lambda: nn.Sequential(MLP(), nn.Dropout(0.5)))
    batches = session.batches(4, 8, count=STEPS)
    for batch in batches[:5]:
        first.run(batch)
    state = copy.deepcopy((first.module.state_dict(), first.optimizer.state_dict()))
    second = Training(session, make=lambda: nn.Sequential(MLP(), nn.Dropout(0.5)))
    second.module.load_state_dict(state[0])
    second.optimizer.load_state_dict(state[1])
    for batch in batches[5:]:
        second.run(batch)
    return [*first.found(), *second.found()]


def test_saved_and_resumed(way):
    compared(way, resumed)


def interrupted(session):
    """A step that raises leaves everything as it was."""
    training = Training(session)
    batches = session.batches(4, 8, count=STEPS)
    for number, batch in enumerate(batches):
        if number == 5:
            before = programs.state(training.module)
            with pytest.raises(Exception, match=r"shape|size"):
                training.step(session.randn(4, 7))
            after = programs.state(training.module)
            assert all(map(torch.equal, before, after))
            assert all(p.grad is None for p in training.module.parameters())
        training.run(batch)
    return training.found()


def test_a_step_that_raises(way):
    compared(way, interrupted)


def copied(session):
    training = Training(session)
    batches = session.batches(4, 8, count=STEPS)
    for batch in batches[:5]:
        training.run(batch)
    other = copy.deepcopy(training.module)
    for batch in batches[5:]:
        training.run(batch)
    return [*training.found(), *programs.state(other)]


def test_a_copy_of_the_module(way):
    compared(way, copied)


def on_threads(session):
    """Two trainings, each on a thread of its own; then one of them on the other's thread."""
    found = {}

    def run(number):
        training = Training(session_of(number))
        for batch in training.session.batches(4, 8, count=STEPS):
            training.run(batch)
        found[number] = training.found()

    def session_of(number):
        return programs.Session(session.device, session.options)

    for number in range(2):
        thread = threading.Thread(target=run, args=(number,))
        thread.start()
        thread.join()
    return [*found[0], *found[1]]


def test_threads(way):
    compared(way, on_threads)


def held(session):
    """Losses and norms of all steps are held, and are what they were."""
    training = Training(session, max_norm=1.0)
    copies = []
    for batch in session.batches(4, 8, count=STEPS):
        training.run(batch)
        copies.append([value.clone() for value in training.values[-2:]])
    now = list(zip(training.values[::2], training.values[1::2], strict=True))
    for before, after in zip(copies, now, strict=True):
        assert all(map(torch.equal, before, after))
    return training.found()


def test_results_are_the_users_own(way):
    compared(way, held)


def broken(module):
    def loss_fn(x):
        out = module(x)
        torch._dynamo.graph_break()
        return out.square().mean()

    return loss_fn


REASONS = {
    "not one graph": (
        {"loss_fn": broken},
        "the loss is not one graph",
    ),
    "an optimizer that reads the device": (
        {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.01)},
        "AdamW reads the device in step(): make it with fused=True",
    ),
    "an optimizer that can't": (
        {"optimizer": lambda params: torch.optim.Rprop(params, lr=0.01)},
        "Rprop reads the device in step(): make it with capturable=True",
    ),
    "several results": (
        {"loss_fn": lambda m: lambda x: m(x).square().mean(), "accumulate": 2},
        "accumulate=2",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_pieces_say_why(way, name, caplog):
    settings, why = REASONS[name]
    program = use(**settings)
    compared(way, program)
    way.run(program)
    step = program.step
    assert step.whole_calls == 0
    assert why in step.explain()
    assert sum(why in record.getMessage() for record in caplog.records) >= 1
    assert why in cgpass.summary()


def test_accumulation_adds_up(way):
    def program(session):
        training = Training(session, accumulate=3)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=8)):
            training.run(batch)
            grads = programs.gradients(training.module)
            assert bool(grads) == ((number + 1) % 3 != 0)
            values += grads
        assert training.step.flush()
        assert not training.step.flush()
        assert not programs.gradients(training.module)
        return values + training.found()

    compared(way, program)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"scaler": 3}, "scaler is a int"),
        ({"options": {"compilr": "eager"}}, "compiler"),
    ],
)
def test_bad_arguments(settings, error):
    module = MLP()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    with pytest.raises(cgpass.errors.CGPassError, match=error):
        cgpass.train_step(module, optimizer, **settings)


def test_an_optimizer_is_needed():
    with pytest.raises(cgpass.errors.InputError, match="optimizer is a list"):
        cgpass.train_step(MLP(), [[]])
    with pytest.raises(cgpass.errors.InputError, match="empty"):
        cgpass.train_step(MLP(), [])
