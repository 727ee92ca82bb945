"""What a sample draws depends on (seed, epoch, sample) only, and a sample that draws nothing is not seeded for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from hpcddp.training.data import randomness
from hpcddp.training.data.randomness import SeededSamples, fork_generators, seed_generators

SEED = 3
DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python's normal": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "numpy's normal": lambda: float(np.random.randn()),
    "torch": lambda: float(torch.rand(1)),
    "torch's normal": lambda: float(torch.randn(1)),
    "many of python's": lambda: [random.getrandbits(32) for _ in range(624)],
    "many of numpy's": lambda: np.random.bytes(4 * 624),
}


class Programs(Dataset):
    """Sample i makes the draws that programs[i] names; none for an empty program."""

    def __init__(self, programs: list[list[str]]) -> None:
        self.programs = programs

    def __len__(self) -> int:
        return len(self.programs)

    def __getitem__(self, index: int) -> list[Any]:
        return [index, *(DRAWS[name]() for name in self.programs[index])]


def _alone(data: Programs, epoch: int, index: int) -> list[Any]:
    """The sample by the definition: right after the generators were seeded from its key."""
    with fork_generators():
        seed_generators("sample", SEED, epoch, index)
        return data[index]


def _states() -> list[Any]:
    """By the generators' own functions."""
    numpys = np.random.get_state()
    return [random.getstate(), numpys[1].tolist(), numpys[2:], torch.get_rng_state().tolist()]


names = st.sampled_from(sorted(DRAWS))
# most samples of a data set that draws rarely draw nothing
programs = st.lists(st.one_of(st.just([]), st.just([]), st.lists(names, max_size=3)), min_size=1, max_size=12)


@given(programs, st.data())
def test_a_sample_draws_what_its_key_gives_in_any_batch_order_and_worker_and_whatever_was_drawn_elsewhere(
    programs: list[list[str]], data: st.DataObject
) -> None:
    dataset = Programs(programs)
    workers = [SeededSamples(dataset, SEED) for _ in range(2)]  # of any ranks: they know nothing of each other
    for _ in range(data.draw(st.integers(1, 4), "batches")):
        epoch = data.draw(st.integers(0, 1), "epoch")
        batch = data.draw(st.lists(st.integers(0, len(programs) - 1), min_size=1, max_size=6), "batch")
        for name in data.draw(st.lists(names, max_size=2), "draws of the loop"):
            DRAWS[name]()
        before = _states()
        samples = data.draw(st.sampled_from(workers), "worker").__getitems__([(epoch, i) for i in batch])
        assert samples == [_alone(dataset, epoch, i) for i in batch]
        assert _states() == before


@pytest.mark.parametrize(
    ("program", "reads"), [([], [0, 1, 2, 3, 0, 1]), (["torch"], [0, 1, 2, 3, 0, 1, 2, 3, 0, 1])], ids=["none", "draws"]
)
def test_only_the_first_batch_that_draws_is_read_twice(program: list[str], reads: list[int]) -> None:
    found = []

    class Listed(Programs):
        def __getitem__(self, index: int) -> list[Any]:
            found.append(index)
            return super().__getitem__(index)

    samples = SeededSamples(Listed([program] * 4), SEED)
    samples.__getitems__([(0, i) for i in range(4)])
    samples.__getitems__([(1, i) for i in range(2)])
    assert found == reads


@pytest.mark.parametrize("after", [[], ["torch"]], ids=["draws nothing", "drew"])
def test_an_error_of_a_sample_passes_and_leaves_the_generators_as_they_were(after: list[str]) -> None:
    class Broken(Programs):
        def __getitem__(self, index: int) -> list[Any]:
            super().__getitem__(index)
            raise OSError("no such image")

    before = _states()
    with pytest.raises(OSError, match="no such image"):
        SeededSamples(Broken([after]), SEED).__getitems__([(0, 0)])
    assert _states() == before


def test_the_seed_that_a_sample_reads_without_drawing_follows_the_epoch() -> None:
    class ReadsSeed(Programs):
        def __getitem__(self, index: int) -> int:
            return torch.initial_seed()

    def read(epoch: int) -> list[object]:
        torch.rand(1)
        return SeededSamples(ReadsSeed([[]] * 6), SEED).__getitems__([(epoch, 0), (epoch, 1)])

    assert read(0) == read(0) != read(1)


def test_a_data_set_that_reads_several_samples_at_once_is_asked_so() -> None:
    class AtOnce(Programs):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [("at once", i) for i in indices]

    samples = SeededSamples(AtOnce([[]] * 4), SEED)
    assert samples.__getitems__([(0, i) for i in range(4)]) == [("at once", i) for i in range(4)]


NORMAL = "numpy's normal"  # made in pairs: its words and place are the same after one, which leaves another, and two


@example([NORMAL], [NORMAL])
@example([NORMAL, NORMAL], [])
@given(st.lists(names, max_size=3), st.lists(names, max_size=3))
def test_states_can_be_put_back(first: list[str], then: list[str]) -> None:
    for name in first:
        DRAWS[name]()
    expected = _states()
    with fork_generators():
        for name in then:
            DRAWS[name]()
    assert _states() == expected


def test_tensors_in_memory_are_read_without_a_look_at_the_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = TensorDataset(torch.arange(6))
    monkeypatch.setattr(randomness, "read_states", lambda: pytest.fail("looked"))
    for data in (tensors, Subset(tensors, range(6))):
        assert SeededSamples(data, SEED).__getitems__([(0, 2), (0, 5)]) == [(2,), (5,)]

    class Drawing(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(1)

    with pytest.raises(pytest.fail.Exception, match="looked"):
        SeededSamples(Subset(Drawing(torch.arange(6)), range(6)), SEED).__getitems__([(0, 2)])


def _mix(samples: list[Any]) -> list[float]:
    return [random.random(), float(torch.rand(1)), float(np.random.rand()), *map(float, samples)]


def test_what_a_collate_function_draws_in_a_loader_process_depends_on_its_batch_only() -> None:
    draws = [[(epoch, i) for i in part] for epoch in range(2) for part in ((0, 1, 2), (3, 4, 5))]

    def read(start: int, workers: int) -> list[list[float]]:
        samples = SeededSamples(Numbers(), SEED, collates=True)
        return list(DataLoader(samples, batch_sampler=draws[start:], num_workers=workers, collate_fn=_mix))

    whole = read(0, 1)
    assert len({batch[0] for batch in whole}) == 4
    assert read(0, 2) == whole
    assert read(1, 1) == whole[1:], "a resumed run"


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index
