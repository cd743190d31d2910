"""Functions that are replaced while something runs: for who is inside, and whatever the order in which they leave."""

import threading
import types

import pytest

from cgpass.torch_private.replacing import Replaced


@pytest.fixture
def owner():
    return types.SimpleNamespace(double=lambda x: 2 * x)


@pytest.fixture
def replaced(owner):
    return Replaced(lambda: owner, "double", lambda fn, x: fn(x) + 1)


def test_only_who_is_inside_notices(owner, replaced):
    before, told = owner.double, []
    with replaced:
        with replaced:
            assert owner.double(3) == 7
        assert owner.double(3) == 7
        thread = threading.Thread(target=lambda: told.append(owner.double(3)))
        thread.start()
        thread.join()
    assert told == [6]
    assert owner.double is before


def test_threads_leave_in_any_order(owner, replaced):
    before, steps = owner.double, [threading.Event() for _ in range(2)]

    def other():
        with replaced:
            steps[0].set()
            steps[1].wait(60)
        steps[0].set()

    thread = threading.Thread(target=other)
    with replaced:
        thread.start()
        assert steps[0].wait(60)
    assert owner.double(3) == 6
    assert owner.double is not before
    steps[1].set()
    thread.join()
    assert owner.double is before


def test_an_error_puts_it_back(owner, replaced):
    before = owner.double
    with pytest.raises(ZeroDivisionError), replaced:
        raise ZeroDivisionError
    assert owner.double is before


def test_static_methods_stay_so():
    class Owner:
        @staticmethod
        def double(x):
            return 2 * x

    before = vars(Owner)["double"]
    with Replaced(lambda: Owner, "double", lambda fn, x: fn(x) + 1):
        assert (Owner.double(3), Owner().double(3)) == (7, 7)
    assert vars(Owner)["double"] is before
