"""`Record` behaves as typing.NamedTuple does."""

from __future__ import annotations

import copy
import pickle
from typing import NamedTuple

import pytest

from hpcddp.record import Record


class Ours(Record):
    """Text."""

    first: int
    second: str = "b"
    third: tuple[int, ...] = ()

    @property
    def twice(self) -> int:
        return 2 * self.first


class Typing(NamedTuple):
    """Text."""

    first: int
    second: str = "b"
    third: tuple[int, ...] = ()

    @property
    def twice(self) -> int:
        return 2 * self.first


BOTH = pytest.mark.parametrize("kind", [Ours, Typing])
CALLS = [((1,), {}), ((1, "x"), {}), ((1,), {"third": (2,)}), ((), {"second": "y", "first": 3}), ((1, "x", (9,)), {})]
WRONG = [((), {}), ((1, "x", (), 4), {}), ((1,), {"first": 2}), ((1,), {"fourth": 2}), ((), {"second": "y"})]


@pytest.mark.parametrize(("values", "named"), CALLS)
def test_a_record_is_made_as_a_named_tuple_is(values, named):
    ours, theirs = Ours(*values, **named), Typing(*values, **named)
    assert ours == theirs == tuple(ours)
    assert (ours._asdict(), ours._fields, ours.twice) == (theirs._asdict(), theirs._fields, theirs.twice)
    assert repr(ours) == repr(theirs).replace("Typing", "Ours")
    assert ours._replace(second="z") == theirs._replace(second="z")
    assert Ours._make(ours) == ours
    assert hash(ours) == hash(theirs)


@BOTH
@pytest.mark.parametrize(("values", "named"), WRONG)
def test_missing_unknown_and_double_values_are_type_errors(kind, values, named):
    with pytest.raises(TypeError):
        kind(*values, **named)


@BOTH
def test_a_record_cannot_be_changed_and_can_be_copied_and_sent(kind):
    one = kind(1, third=(2, 3))
    for name in ("first", "fourth"):
        with pytest.raises(AttributeError):
            setattr(one, name, 5)
    assert type(copy.deepcopy(one)) is type(pickle.loads(pickle.dumps(one))) is kind
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert not isinstance(kind.first, property), "a field, which no code computes"
    match one:
        case kind(first, second, third):
            assert (first, second, third) == (1, "b", (2, 3))
    assert (kind.__doc__, kind.__name__, kind.__module__) == ("Text.", kind.__qualname__, __name__)
