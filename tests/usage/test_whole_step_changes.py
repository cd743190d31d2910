"""Nothing that a user changes between whole steps is frozen: all that he can reach, one by one, bit for bit.

A training changes one thing after the other; after each it makes a few steps, whose results must be those without
graphs. How many of them ran as a whole is part of each entry.
"""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

import cgpass
from cgpass import torch_private
from tests.usage import programs
from tests.usage.programs import MLP
from tests.usage.test_whole_steps import Loss as Squares
from tests.usage.test_whole_steps import Training, compared, sgd, swap_data

EACH = 4
"""Steps after each change: in pieces where it is noticed so, then a warm-up, a recording, a replay."""


class Net(nn.Module):
    """With something of everything that Python code reads."""

    def __init__(self):
        super().__init__()
        self.body = MLP()
        self.dropout = nn.Dropout(0.5)
        self.scale, self.name, self.table, self.fn = 1.0, "relu", [1.0], torch.sin
        self.register_buffer("shift", torch.ones(8))
        self.plain = torch.ones(8)

    def forward(self, x):
        out = getattr(torch, self.name)(self.fn(self.dropout(self.body(x))))
        return out * self.scale * sum(self.table) + self.shift + self.plain

    def _apply(self, fn, recurse=True):
        self.plain = fn(self.plain)
        return super()._apply(fn, recurse)


def expected(changes, usual):
    """Changes, each with how many of the steps after it run as a whole."""
    return {
        name: change if isinstance(change, tuple) else (change, usual)
        for name, change in changes.items()
    }


def one_by_one(changes, *, meanwhile=False, **settings):
    """A program: changes, each with what it makes of the steps after it."""

    def program(session):
        training = Training(session, **settings)
        for batch in session.batches(4, 8, count=EACH):
            training.run(batch)
        program.names, program.whole = [(len(training.values), "nothing")], {}
        for name, (change, _) in changes.items():
            before = training.step.whole_calls
            with change(training) if meanwhile else contextlib.nullcontext(change):
                if not meanwhile:
                    change(training)
                for batch in session.batches(4, 8, count=EACH):
                    training.run(batch)
            program.whole[name] = training.step.whole_calls - before
            training.values += programs.state(training.module)
            program.names.append((len(training.values), name))
        return training.found()

    return program


def check(way, changes, *, usual=EACH - 1, **settings):
    changes = expected(changes, usual)
    program = one_by_one(changes, **settings)
    ours, whole = way.run(program), program.whole
    found = programs.differences(ours, way.run(program, driver="none"))
    if found:
        first = int(found[0].split()[1])
        pytest.fail(
            f"frozen: {next((name for end, name in program.names if first < end), 'state')}"
        )
    device = way.device.type
    assert whole == {
        name: number[device] if isinstance(number, dict) else number
        for name, (_, number) in changes.items()
    }


def number(name, value):
    def change(training):
        for group in training.optimizer.param_groups:
            group[name] = value

    return change


def attribute(name, value):
    return lambda training: setattr(training.module, name, value)


def change_in_list(training):
    training.optimizer.param_groups[0]["betas"][0] = 0.2


def rate(training):
    """A tensor of a learning rate, with room for a double."""
    training.rates = torch.tensor([0.02, 0.0], device=training.session.device)
    number("lr", training.rates[0])(training)


def rate_of_another_type(training):
    """Keep the last address. CUDA's fused kernels take no double."""
    rates = training.rates
    other = rates if rates.is_cuda else rates.view(torch.float64)
    number("lr", other[0].fill_(0.05))(training)


def states(training):
    return training.optimizer.state.values()


ADAM = {
    "lr": (number("lr", 0.02), 4),
    "lr is an integer": (number("lr", 1), 4),
    "lr is a tensor": (number("lr", torch.tensor(0.03)), 4),
    "lr is a tensor with room": (rate, 4),
    "lr is of another type in its place": (rate_of_another_type, 4),
    "lr is 0": (number("lr", 0.0), 4),
    "lr again": (number("lr", 0.02), 4),
    "initial_lr": (number("initial_lr", 0.5), 4),
    "betas": number("betas", (0.8, 0.9)),
    "betas are a list": lambda t: number("betas", [0.7, 0.9])(t),
    "an item of it": change_in_list,
    "eps": number("eps", 1e-3),
    "weight_decay": number("weight_decay", 0.5),
    "weight_decay is an integer": number("weight_decay", 1),
    "weight_decay as it was": number("weight_decay", 0.5),
    "maximize": number("maximize", True),
    "foreach": number("foreach", False),
    "a number of the user's": number("mine", 3),
    "a tensor for a number": (number("weight_decay", torch.tensor(0.5)), 0),
    "no tensor any more": (number("weight_decay", 0.5), 4),
    "not fused": (number("fused", False), 0),
    "fused": number("fused", True),
    "fused and foreach": (number("foreach", True), 0),
}
SGD = {
    "momentum": number("momentum", 0.9),
    "dampening": number("dampening", 0.3),
    "nesterov": lambda t: (number("dampening", 0.0)(t), number("nesterov", True)(t)),
    "weight_decay": number("weight_decay", 0.1),
    "maximize": number("maximize", True),
    "no momentum": lambda t: (number("nesterov", False)(t), number("momentum", 0.0)(t)),
}


@pytest.mark.parametrize(
    ("changes", "optimizer"), [(ADAM, None), (SGD, sgd())], ids=["adam", "sgd"]
)
def test_hyperparameters(way, changes, optimizer):
    check(way, changes, optimizer=optimizer, max_norm=1.0)


def replaced_group(training):
    groups = training.optimizer.param_groups
    groups[0] = {**groups[0], "lr": 0.05}


def replaced_parameter(training):
    """As where points or neurons come and go: in the module, in the optimizer and in its state."""
    layer, optimizer = training.module.body.layers[0], training.optimizer
    before, layer.weight = layer.weight, nn.Parameter(layer.weight.detach() * 0.5)
    for group in optimizer.param_groups:
        group["params"][:] = [layer.weight if p is before else p for p in group["params"]]
    optimizer.state[layer.weight] = optimizer.state.pop(before)


def replaced_states(training):
    for parameter, state in list(training.optimizer.state.items()):
        training.optimizer.state[parameter] = {k: v.clone() + 0.5 for k, v in state.items()}


def swapped_states(training):
    state = training.optimizer.state
    first, second = [p for p in state if p.dim() == 2]
    state[first], state[second] = state[second], state[first]


def states_in_another_order(training):
    state = training.optimizer.state
    first, second = [p for p in state if p.dim() == 2]
    keys, values = [{first: second, second: first}.get(p, p) for p in state], [*state.values()]
    state.clear()
    state.update(zip(keys, values, strict=True))


def names_of_each_other(state):
    """Rename states that stay where they lay."""
    values = [tensor.abs_() for tensor in state.values()]
    state.clear()
    state.update(zip(("step", "exp_avg_sq", "exp_avg"), values, strict=True))


def set_scale(value):
    def change(training):
        for name, number in (("grad_scale", value), ("found_inf", 0.0)):
            tensor = torch.tensor(number, device=training.session.device)
            setattr(training.optimizer, name, tensor)

    return change


def without_scale(training):
    del training.optimizer.grad_scale, training.optimizer.found_inf


def with_a_later_group(params):
    """The second layer gets an optimizer's group when there are recordings."""
    return torch.optim.AdamW(list(params)[:2], lr=0.01, fused=True)


def group_of_the_rest(training):
    held = {*training.optimizer.param_groups[0]["params"]}
    rest = [p for p in training.module.parameters() if p not in held]
    training.optimizer.add_param_group({"params": rest})


def test_what_the_optimizer_lacked_can_be_given_to_it(way):
    changes = {"nothing": (lambda _: None, 0), "the rest": (group_of_the_rest, EACH - 1)}
    check(way, changes, optimizer=with_a_later_group)


def new_group(training):
    extra = nn.Parameter(torch.ones(3, device=training.session.device))
    training.optimizer.add_param_group({"params": [extra], "lr": 0.5})


def loaded(training):
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def model_loaded(training):
    state = {name: value.clone() * 0.5 for name, value in training.module.state_dict().items()}
    training.module.load_state_dict(state)


def each_state(fn):
    def change(training):
        for state in states(training):
            fn(state)

    return change


def data_of_states(state):
    state["exp_avg"].data = state["exp_avg"].data.clone() * 2


def new_tensor_of_states(state):
    state["exp_avg"] = torch.ones_like(state["exp_avg"])


def gradient_from_before(training):
    for parameter in training.module.parameters():
        parameter.grad = torch.ones_like(parameter)


TENSORS = {
    "a group": replaced_group,
    "the list of groups": (
        lambda t: vars(t.optimizer).update(param_groups=[*t.optimizer.param_groups]),
        4,
    ),
    "the list of parameters": lambda t: t.optimizer.param_groups[0].update(
        params=[*t.optimizer.param_groups[0]["params"]]
    ),
    "a parameter": replaced_parameter,
    "the same once more": replaced_parameter,
    "states": replaced_states,
    "states of each other": swapped_states,
    "states in another order": states_in_another_order,
    "lr is a tensor": (
        number("lr", torch.tensor(0.03)),
        4,
    ),  # else a new one is made for new states
    "states with names of each other": each_state(names_of_each_other),
    "state tensors": each_state(new_tensor_of_states),
    "state in place": (each_state(lambda state: state["exp_avg"].mul_(0.5)), 4),
    "steps of the state": (each_state(lambda state: state["step"].fill_(2)), 4),
    "memory of state": (each_state(data_of_states), 4),
    "a further state": each_state(lambda state: state.update(mine=state["exp_avg"].new_ones(1))),
    "no state": lambda t: t.optimizer.state.clear(),
    "the optimizer loaded": loaded,
    "the model loaded": (model_loaded, 4),
    "memory of parameters": (swap_data, 4),
    "a gradient from before": gradient_from_before,
    "a new group": new_group,
    "the order of groups": lambda t: t.optimizer.param_groups.reverse(),
    "a scale of gradients": set_scale(4.0),
    "another one": set_scale(2.0),
    "none": without_scale,
    "the seed": (lambda _: torch.manual_seed(3), 4),
    "cgpass.reset()": (lambda _: cgpass.reset(), 4),
    "torch.compiler.reset()": lambda _: torch.compiler.reset(),
}


def test_groups_states_and_tensors(way):
    check(way, TENSORS, make=Net, max_norm=1.0)


@pytest.mark.parametrize("change", ["states", "a parameter", "a group"])
def test_a_signal_while_a_change_is_noted(way, change, monkeypatch):
    def program(session):
        training = Training(session, make=Net)
        batches = session.batches(4, 8, count=3 * EACH)
        for number, batch in enumerate(batches):
            if number == EACH:
                TENSORS[change](training)
                with monkeypatch.context() as patched:
                    patched.setattr(torch_private, "why_not_recordable", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        training.step(batch)
            training.run(batch)
        if session.options["driver"] != "none":
            assert training.step.whole_calls == 3 * EACH - 2, training.step.explain()
        return training.found()

    def interrupted(*_):
        raise KeyboardInterrupt

    compared(way, program)


ON_THE_HOST = {"cpu": 3, "cuda": 0}
"""A Python float that changes becomes a tensor on the CPU, which a backward reads, too."""

ATTRIBUTES = {
    "a name": attribute("name", "tanh"),
    "an item": lambda t: t.module.table.append(0.5),
    "a function": attribute("fn", torch.cos),
    "a buffer in place": (lambda t: t.module.shift.mul_(3), 4),
    "a buffer": (lambda t: t.module.register_buffer("shift", t.module.shift * 2), 4),
    "a tensor in place": (lambda t: t.module.plain.mul_(3), 4),
    "a tensor": (lambda t: setattr(t.module, "plain", t.module.plain * 0 + 0.5), 4),
    "eval": lambda t: t.module.eval(),
    "train": (lambda t: t.module.train(), 4),
    "dropout": lambda t: setattr(t.module.dropout, "p", 0.1),
    "forward": lambda t: setattr(t.module.dropout, "forward", lambda x: x * 2),
    "a number": (attribute("scale", 2.5), ON_THE_HOST),
}


def test_attributes_of_the_module(way):
    with torch._dynamo.config.patch(recompile_limit=64):
        check(way, ATTRIBUTES, make=Net)


def test_hooks_on_modules_where_dynamo_looks_for_them(way):
    """By default `torch.compile` knows only those that were there when it compiled."""
    hooks = {
        "a hook": lambda t: hooked(lambda: t.module.register_forward_hook(lambda m, i, o: o * 3)),
        "none": (lambda _: contextlib.nullcontext(), 4),
        "a hook before": lambda t: hooked(
            lambda: t.module.register_forward_pre_hook(lambda m, i: (i[0] * 3,))
        ),
    }
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        check(way, hooks, meanwhile=True)


def scaler_method(name, *args):
    return lambda training: getattr(training.scaler, name)(*args)


def scaler_loaded(training):
    training.scaler.load_state_dict({**training.scaler.state_dict(), "scale": 64.0})


class Slower(torch.amp.GradScaler):
    def update(self, new_scale=None):
        super().update(new_scale)
        self._scale.mul_(0.5)


SCALER = {
    "growth_factor": scaler_method("set_growth_factor", 3.0),
    "backoff_factor": scaler_method("set_backoff_factor", 0.25),
    "growth_interval": scaler_method("set_growth_interval", 1),
    "scale": (scaler_method("update", 128.0), 4),
    "scale loaded": (scaler_loaded, 4),
    "scale()": (lambda t: setattr(t.scaler, "scale", lambda loss: loss * 512.0), 0),
    "scale() as before": lambda t: delattr(t.scaler, "scale"),
    "a class": (lambda t: setattr(t.scaler, "__class__", Slower), 0),
    "a class of torch": lambda t: setattr(t.scaler, "__class__", torch.amp.GradScaler),
    "disabled": (lambda t: setattr(t.scaler, "_enabled", False), 0),
    "enabled": lambda t: setattr(t.scaler, "_enabled", True),
}


def test_numbers_of_a_scaler(way):
    check(way, SCALER, max_norm=1.0, scale=2.0**8)


def flag(holder, name, *value):
    return lambda: getattr(holder, name), lambda now: setattr(holder, name, now), *value


CUDNN, MATMUL, BLAS = (
    torch.backends.cudnn,
    torch.backends.cuda.matmul,
    torch.backends.cuda.preferred_blas_library,
)
FLAGS = {
    "cudnn.enabled": flag(CUDNN, "enabled"),
    "cudnn.benchmark": flag(CUDNN, "benchmark"),
    "cudnn.deterministic": flag(CUDNN, "deterministic"),
    "cudnn.allow_tf32": flag(CUDNN, "allow_tf32"),
    "cudnn.conv.fp32_precision": flag(CUDNN.conv, "fp32_precision", "ieee"),
    "cudnn.rnn.fp32_precision": flag(CUDNN.rnn, "fp32_precision", "ieee"),
    "cuda.matmul.fp32_precision": flag(MATMUL, "fp32_precision", "tf32"),
    "cuda.matmul.allow_fp16_accumulation": flag(MATMUL, "allow_fp16_accumulation"),
    "cuda.preferred_blas_library": (BLAS, BLAS, "cublaslt"),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
}


def test_no_flag_is_left_out():
    assert torch_private.host_reads(None).keys() <= FLAGS.keys()


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_in_the_key(way, name):
    """On CPU they make no bits differ: a recording of its own is made for each value."""

    def program(session):
        training = Training(session)
        get, put, *value = FLAGS[name]
        before, recorded, batches = get(), [], session.batches(4, 8, count=5)
        try:
            for now in (before, *(value or [not before]), before):
                put(now)
                with programs.counted() as counters:
                    for batch in batches:
                        training.run(batch)
                recorded.append(counters["recordings"])
        finally:
            put(before)
        assert recorded[0] == 1
        assert recorded[1] >= 1
        assert recorded[2] in (0, 2)  # of forward and backward, for another call in pieces
        assert training.step.whole_calls == 4 + 4 + 4
        return training.found()

    way.run(program)


@contextlib.contextmanager
def hooked(register):
    handle = register()
    try:
        yield
    finally:
        handle.remove()


def first(training):
    return next(training.module.parameters())


@contextlib.contextmanager
def on_node(training, hook, *, before=False):
    """On the node that adds to a parameter's `.grad`, and lives as long as somebody holds it."""
    node = torch.autograd.graph.get_gradient_edge(first(training)).node
    with hooked(lambda: (node.register_prehook if before else node.register_hook)(hook)):
        yield


@contextlib.contextmanager
def replaced(holder, name, value):
    had = name == "__class__" or name in vars(holder)
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before) if had else delattr(holder, name)


def twice(grad):
    return grad * 2


def twice_accumulated(parameter):
    parameter.grad.mul_(2)


def less(optimizer, *_):
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


class Doubled(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.backward:
            args = (args[0] * 2, *args[1:])
        return func(*args, **(kwargs or {}))


def shrinking(step, parameter):
    """Does more than torch's own, and says with `functools.wraps` that it is that."""

    @functools.wraps(step)
    def call(*args, **kwargs):
        call.factor *= 0.5
        parameter.data.mul_(call.factor)
        return step(*args, **kwargs)

    call.factor = 1.0
    return call


def halved(x):
    return x * 0.5


MEANWHILE = {
    "a hook": lambda t: hooked(lambda: first(t).register_hook(twice)),
    "a hook on .grad": lambda t: hooked(
        lambda: first(t).register_post_accumulate_grad_hook(twice_accumulated)
    ),
    "a hook on a node": lambda t: on_node(t, lambda *_: None),
    "a hook before a node": lambda t: on_node(t, lambda grads: (grads[0] * 2,), before=True),
    "a hook on several": lambda t: hooked(
        lambda: torch.autograd.graph.register_multi_grad_hook(
            [*t.module.parameters()], lambda grads: None
        )
    ),
    "a hook before step()": lambda t: hooked(lambda: t.optimizer.register_step_pre_hook(less)),
    "a hook on step()": lambda t: hooked(lambda: t.optimizer.register_step_post_hook(less)),
    "a hook on every step()": lambda _: hooked(lambda: register_optimizer_step_post_hook(less)),
    "hooks on saved tensors": lambda _: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, halved
    ),
    "a function mode": lambda _: Doubled(),
    "anomaly detection": lambda _: torch.autograd.detect_anomaly(check_nan=False),
    "a default device": (lambda t: t.session.device, 3),
    "autocast": (lambda t: torch.autocast(t.session.device.type, torch.bfloat16), 3),
    "step() of the class": lambda _: replaced(
        torch.optim.AdamW, "step", lambda self, closure=None: None
    ),
    "step() of the optimizer, wrapped": lambda t: replaced(
        t.optimizer, "step", shrinking(t.optimizer.step, first(t))
    ),
    "a dispatch mode": lambda _: FlopCounterMode(display=False),
    "step() of the optimizer": lambda t: replaced(t.optimizer, "step", lambda: None),
    "zero_grad()": lambda t: replaced(t.optimizer, "zero_grad", lambda set_to_none: None),
    "a class": lambda t: replaced(t.optimizer, "__class__", type("Mine", (torch.optim.AdamW,), {})),
    "nothing": (lambda _: contextlib.nullcontext(), 3),
    "still nothing": (lambda _: contextlib.nullcontext(), 4),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_what_is_around_some_steps(way):
    check(way, MEANWHILE, usual=0, meanwhile=True, max_norm=1.0)


def test_a_loss_that_leaves_the_autocast_around_its_step(way):
    def outside(module):
        def loss_fn(x):
            with torch.autocast(x.device.type, enabled=False):
                return module(x).square().mean()

        return loss_fn

    def program(session):
        training = Training(session, loss_fn=outside)
        for batch in session.batches(4, 8, count=4):
            with torch.autocast(session.device.type, torch.bfloat16):
                training.run(batch)
        if session.options["driver"] != "none":
            assert training.step.whole_calls == 3
        return training.found()

    compared(way, program)


def test_hooks_that_no_python_code_sees(way, process_group):
    """Those that DDP puts on the nodes of parameters, in C++, stay after it."""
    del process_group
    if way.device.type != "cpu":
        pytest.skip("the group is one of a CPU")

    def program(session):
        training = Training(session)
        for number, batch in enumerate(session.batches(4, 8, count=6)):
            if number == 3:
                training.hooking = nn.parallel.DistributedDataParallel(training.module)
            training.run(batch)
        if session.options["driver"] != "none":
            assert training.step.whole_calls == 2
            assert any("weight has hooks" in why for why in training.step.in_pieces)
        return training.found()

    compared(way, program)


def fsdp(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, fsdp])
def test_what_talks_to_other_processes_runs_in_pieces(wrap, process_group):
    del process_group

    def losses(wrap, driver):
        torch.manual_seed(0)
        module = wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
        options = {"driver": driver, "compiler": "eager", "on_skip": "silent"}
        step = cgpass.train_step(lambda x: module(x).square().mean(), optimizer, options=options)
        return [step(torch.ones(4, 8) * n).item() for n in range(5)], step.in_pieces

    found, in_pieces = losses(wrap, "simulated")
    assert in_pieces == {"it communicates with other processes": 5}
    assert found == losses(lambda module: module, "none")[0]


def test_guards_are_the_users_to_leave_out(way):
    """With `guard_filter_fn`, an option of torch.compile: what is not guarded is frozen, by the user's own choice."""
    session = way.session()
    leave_out = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    session.options = {**session.options, **leave_out}
    training = Training(session, make=Net)
    for number, batch in enumerate(session.batches(4, 8, count=6)):
        training.module.name = ("relu", "tanh")[number > 3]
        training.run(batch)
    assert training.step.whole_calls == 5, training.step.explain()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_is_not_taken_for_a_hook(way):
    """Dynamo turns it on for all threads while it compiles in one."""
    training = Training(way.session())
    (batch,) = training.session.batches(4, 8, count=1)
    for _ in range(3):
        training.run(batch)
    with torch.autograd.detect_anomaly(check_nan=False):
        training.run(batch)
    (why,) = training.step.in_pieces.keys() - {"the first call of a variant"}
    assert why.startswith("anomaly detection is on; torch.compile turns it on, too")


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "closure"])
def test_a_gradient_from_before_is_named_as_its_parameter(wrapped):
    net, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.ones(4, 3)
    loss_fn = (lambda x: net(x).square().mean()) if wrapped else Squares(net)
    optimizer = sgd()(net.parameters())
    options = {"driver": "simulated", "compiler": "eager", "on_skip": "silent"}
    step = cgpass.train_step(loss_fn, optimizer, options=options)
    for _ in range(3):
        step(x)
    net[0].bias.grad = torch.ones(2)
    step(x)
    name = "0.bias" if wrapped else "loss_fn.module.0.bias"
    assert f"{name} has a gradient from before; call zero_grad() first" in step.in_pieces
