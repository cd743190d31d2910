"""The simulated driver fails where a CUDA graph would."""

import gc
import weakref

import pytest
import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.simulated import SimulatedDriver, SimulatedPool


@pytest.fixture
def driver():
    return SimulatedDriver()


_inputs = []


@pytest.fixture(autouse=True)
def _free_inputs():
    yield
    _inputs.clear()


def record(driver, fn, *args, opaque=False):
    graph, outputs = driver.record(lambda inputs: fn(*inputs), list(args), opaque=opaque)
    _inputs.append(args)  # a graph reads them where they lie, and keeps none alive
    return graph, outputs


def test_host_code_does_not_run_again(driver):
    runs = []

    def fn(x):
        runs.append(len(runs))
        return [x + len(runs)]

    x = torch.zeros(2)
    graph, (out,) = record(driver, fn, x)
    for _ in range(3):
        graph.replay()
        assert out.tolist() == [1, 1]
    assert runs == [0]


@pytest.mark.parametrize("opaque", [False, True])
def test_inputs_are_read_where_they_lay(driver, opaque):
    x = torch.ones(2)
    graph, (out,) = record(driver, lambda x: [x * 3], x, opaque=opaque)
    x.fill_(2)
    graph.replay()
    assert out.tolist() == [6, 6]
    kept = x.data
    x.data = torch.full((2,), 5.0)
    graph.replay()
    assert out.tolist() == [6, 6], "the parameter moved, the graph did not notice"
    kept.fill_(1)
    graph.replay()
    assert out.tolist() == [3, 3]


@pytest.mark.parametrize("opaque", [False, True])
def test_the_next_replay_overwrites_outputs(driver, opaque):
    x = torch.ones(2)
    graph, (out,) = record(driver, lambda x: [x + 1], x, opaque=opaque)
    graph.replay()
    handed_out = out.detach()
    x.fill_(7)
    graph.replay()
    assert handed_out.tolist() == [8, 8]


def test_outputs_mean_nothing_before_the_first_replay(driver):
    _, (out,) = record(driver, lambda x: [x + 1], torch.ones(2))
    assert out.isnan().all()


def test_a_later_recording_reuses_temporaries(driver):
    x = torch.ones(64)
    first, (a,) = record(driver, lambda x: [(x * 2).sum(0, keepdim=True)], x)
    second, (b,) = record(driver, lambda x: [x * 5], x)
    first.replay()
    second.replay()
    assert (b == 5).all()
    first.replay()
    assert a.tolist() == [128]
    assert not (b == 5).all(), "the first one's temporary lies on the second one's output"


def test_recordings_never_lie_on_each_others_outputs(driver):
    x = torch.ones(4)
    outputs = [record(driver, lambda x: [x.sin() + 1], x)[1][0] for _ in range(5)]
    assert len({out.data_ptr() for out in outputs}) == 5


def test_recording_changes_no_input(driver):
    x = torch.ones(2)
    graph, _ = record(driver, lambda x: [x.add_(1)], x)
    assert x.tolist() == [1, 1]
    graph.replay()
    assert x.tolist() == [2, 2]


def test_a_failed_recording_changes_no_input(driver):
    x = torch.ones(2)

    def fn(x):
        x.add_(1)
        raise ValueError("user's")

    with pytest.raises(ValueError, match="user's"):
        record(driver, fn, x)
    assert x.tolist() == [1, 1]
    assert not driver.is_capturing()


def test_recording_draws_no_random_number_and_replays_do(driver):
    torch.manual_seed(3)
    expected = [torch.rand(2) for _ in range(3)]
    torch.manual_seed(3)
    graph, (out,) = record(driver, lambda: [torch.rand(2)])
    for value in expected:
        graph.replay()
        assert torch.equal(out, value)


def test_a_registered_generator_advances(driver):
    generator = torch.Generator().manual_seed(5)
    expected = [torch.rand(2, generator=generator) for _ in range(3)]
    generator.manual_seed(5)
    graph, (out,) = record(driver, lambda g: [torch.rand(2, generator=g)], generator)
    for value in expected:
        graph.replay()
        assert torch.equal(out, value)


def test_an_unregistered_generator_is_refused(driver):
    generator = torch.Generator()
    with pytest.raises(RuntimeError, match="is not registered with the graph"):
        record(driver, lambda: [torch.rand(2, generator=generator)])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: [x + x.sum().item()],
        lambda x: [x + 1] if x.sum() > 0 else [x],
        lambda x: [torch.nonzero(x)],
        lambda x: [x[x > 0]],
        lambda x: [torch.unique(x)],
        lambda x: [torch.masked_select(x, x > 0)],
        lambda x: [x * sum(x.tolist())],
        lambda x: [x + torch.from_numpy(x.numpy())],
        lambda x: [x.cpu() + 1],
    ],
    ids=["item", "if", "nonzero", "mask", "unique", "masked_select", "tolist", "numpy", "cpu"],
)
@pytest.mark.parametrize("opaque", [False, True])
def test_host_reads_are_refused(driver, fn, opaque):
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        record(driver, fn, torch.ones(3), opaque=opaque)
    assert not driver.is_capturing()


def test_integer_indexing_is_no_host_read(driver):
    index = torch.tensor([0, 2])
    graph, (out,) = record(driver, lambda x, i: [x[i]], torch.arange(3.0), index)
    index.fill_(1)
    graph.replay()
    assert out.tolist() == [1, 1]


def test_views_follow_their_base(driver):
    x = torch.zeros(2, 3)

    def fn(x):
        y = x + 1
        y[0].mul_(10)
        return [y, y[1]]

    graph, (whole, part) = record(driver, fn, x)
    x.fill_(1)
    graph.replay()
    assert whole.tolist() == [[20] * 3, [2] * 3]
    assert part.data_ptr() == whole[1].data_ptr()
    assert part.tolist() == [2] * 3


def test_it_says_that_it_records(driver):
    seen = []
    record(driver, lambda x: [seen.append(driver.is_capturing()) or x + 1], torch.ones(1))
    assert seen == [True]
    assert not driver.is_capturing()


def test_no_garbage_collection_while_recording(driver):
    seen = []
    record(driver, lambda x: [seen.append(gc.isenabled()) or x + 1], torch.ones(1))
    assert seen == [False]
    assert gc.isenabled()


def test_an_output_of_an_earlier_recording_is_read_where_it_lies(driver):
    x = torch.ones(2)
    first, (a,) = record(driver, lambda x: [x * 2], x)
    second, (b,) = record(driver, lambda a: [a + 1], a)
    for value in (1, 5):
        x.fill_(value)
        first.replay()
        second.replay()
        assert b.tolist() == [2 * value + 1] * 2


def test_neither_a_tape_nor_its_reset_keeps_inputs_alive(driver):
    x = torch.ones(2)
    graph, (out,) = driver.record(lambda args: [args[0] * 2], [x], opaque=False)
    graph.replay()
    alive = weakref.ref(x)
    del x
    assert alive() is None, "inputs belong to whoever calls"
    graph.reset()
    assert out.tolist() == [2, 2]


# ---- the pool


def test_a_block_is_used_again_within_a_recording_when_its_tensor_has_died(driver):
    seen = []

    def fn(x):
        a = x + 1
        seen.append(a.data_ptr())
        b = a * 2
        del a
        c = b - 3
        seen.append(c.data_ptr())
        return [c]

    x = torch.ones(4)
    graph, (out,) = record(driver, fn, x)
    assert seen[0] == seen[1] == out.data_ptr()
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * (value + 1) - 3] * 4


def test_a_tensor_that_lives_keeps_its_block_within_a_recording(driver):
    def fn(x):
        a = x + 1
        b = a[1:]
        del a
        c = x * 2
        return [b, c, c.sum(0, keepdim=True)]

    x = torch.ones(4)
    graph, (b, c, total) = record(driver, fn, x)
    graph.replay()
    assert len({t.untyped_storage().data_ptr() for t in (b, c, total)}) == 3
    assert (b.tolist(), c.tolist(), total.tolist()) == ([2] * 3, [2] * 4, [8])


def test_an_output_that_died_is_lain_on_by_a_later_recording(driver):
    x = torch.ones(4)
    first, (a,) = record(driver, lambda x: [x + 1], x)
    address = a.data_ptr()
    del a
    second, (b,) = record(driver, lambda x: [x * 7], x)
    assert b.data_ptr() == address
    second.replay()
    first.replay()
    assert b.tolist() == [2] * 4


def test_an_input_that_owns_its_block_dies_inside_a_recording(driver):
    x = torch.ones(4)
    first, made = record(driver, lambda x: [x * 3], x)
    address = made[0].data_ptr()

    def consumes(inputs):
        (a,) = inputs
        inputs.clear()
        b = a + 1
        del a
        return [b * 2]

    second, (out,) = driver.record(consumes, made, opaque=False)
    assert out.data_ptr() == address
    for value in (1.0, 4.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert out.tolist() == [(3 * value + 1) * 2] * 4


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("opaque", [False, True])
def test_recording_on_memory_that_was_used_before_leaves_its_contents(driver, opaque, fails):
    """Its first owner died, but an alias that owns nothing still reads there."""
    x = torch.arange(4.0)
    first, (a,) = record(driver, lambda x: [x + 10], x)
    first.replay()
    alias = torch_private.tensor_at_address(a)
    address = a.data_ptr()
    del a
    found = []

    def fn(x):
        out = x * 5
        out.add_(1)
        found.append(out.data_ptr())
        if fails:
            raise ValueError("user's")
        return [out]

    if fails:
        with pytest.raises(ValueError, match="user's"):
            record(driver, fn, x, opaque=opaque)
    else:
        graph, (out,) = record(driver, fn, x, opaque=opaque)
        assert out.data_ptr() == address
        assert alias.tolist() == [10, 11, 12, 13]
        graph.replay()
        assert alias.tolist() == [1, 6, 11, 16]
    if not opaque:
        assert found == [address]
    if fails:
        assert alias.tolist() == [10, 11, 12, 13]


def test_memory_outlives_the_pool_while_it_is_held(driver):
    graph, (out,) = record(driver, lambda x: [x + 1], torch.ones(64))
    graph.replay()
    graph.reset()
    del graph
    others = [torch.full((64,), -1.0) for _ in range(64)]
    del driver
    gc.collect()
    assert out.tolist() == [2] * 64
    assert len(others) == 64


def test_memory_is_given_back_when_pool_and_holders_are_gone():
    pool = SimulatedPool()
    storage = pool.allocate(64)
    address = storage.data_ptr()
    (block,) = pool._blocks.values()
    buffer = weakref.ref(block)
    del block
    assert address in pool
    assert pool.addresses() == {address}
    del storage
    assert pool.allocate(64).data_ptr() == address, "free, and used again"
    assert pool.allocate(32).data_ptr() != address, "of another size"
    held = pool.allocate(64)
    del pool
    gc.collect()
    assert buffer() is not None
    held.fill_(3)
    del held
    gc.collect()
    assert buffer() is None


def test_two_slots_share_no_memory(driver):
    x = torch.ones(4)
    addresses = set()
    graphs = []
    for slot in (0, 1, 0, 1):
        graph, outputs = driver.record(lambda args: [args[0] * 2], [x], opaque=False, slot=slot)
        addresses.add((slot, outputs[0].data_ptr()))
        graphs.append(graph)
        del outputs
    assert len(addresses) == 2, "one block in each, used again"
    assert len({address for _, address in addresses}) == 2


def test_swapped_memory_stays_where_replays_write(driver):
    x = torch.ones(4)
    graph, (out,) = record(driver, lambda x: [x * 2], x)
    graph.replay()
    stand_in = torch_private.tensor_at_address(out)
    handed_out = stand_in.detach()
    moved = stand_in.clone()
    fast.swap_storages([stand_in], [moved])
    x.fill_(5)
    graph.replay()
    assert handed_out.tolist() == [2] * 4
    assert moved.tolist() == [10] * 4
    assert moved.data_ptr() == out.data_ptr()
