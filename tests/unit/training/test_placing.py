"""A model that its script has put on several devices of the rank. Nothing here needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcddp.errors import LaunchError, RequestError
from hpcddp.parallelism import Split
from hpcddp.training.parallel.strategy import check_places, list_accelerators, place
from hpcddp.training.rendezvous.group import Group, Member, choose_backend, device_indices
from hpcddp.training.torch_compat import HashStore

OWN = tuple(torch.device("cuda", index) for index in (2, 3))
DDP, FSDP = Split("ddp", ((0,), (1,))), Split("fsdp", ((0, 1),))
# two ranks on a node that see all of its four GPUs
MEMBERS = tuple(Member(rank, "a", rank, rank, "0", ("0", "1", "2", "3")) for rank in range(2))


def test_a_rank_takes_the_neighbours_that_its_job_gives_it_and_gloo_ranks_may_share_one() -> None:
    group = Group(1, 2, "srun", "nccl", OWN[0], MEMBERS, HashStore(), OWN[1:])
    assert group.devices == OWN
    assert [device_indices(MEMBERS, rank, "nccl", 2) for rank in range(2)] == [(0, 1), (2, 3)]
    members = tuple(member._replace(gpus=("0",)) for member in MEMBERS)
    assert device_indices(members, 1, "gloo", 2) == (0,)


def test_all_ranks_open_one_backend_or_none() -> None:
    blind = [Member(rank, f"n{rank}", rank, 0, "0", (), "no driver") for rank in range(3)]
    seeing = [one._replace(gpus=("0", "1")) for one in blind]
    assert choose_backend(tuple(seeing), 2) == choose_backend(tuple(seeing), 0) == "nccl"
    assert choose_backend(tuple(blind), 0) == "gloo"
    for members, gpus, words in (
        ((seeing[0], *blind[1:]), 0, "rank 1 on n1 (and 1 more) sees no GPU, and rank 0 on n0 sees 2 GPUs: no driver"),
        ((*blind[:1], *seeing[1:]), 2, "rank 0 on n0 sees no GPU, and rank 1 on n1 sees 2 GPUs: no driver"),
        (tuple(blind), 2, "the job has 2 GPUs on each node, and rank 0 on n0 (and 2 more) sees none: no driver"),
    ):
        with pytest.raises(LaunchError) as caught:
            choose_backend(members, gpus)
        assert caught.value.message == words


def test_a_model_on_no_accelerator_or_one_goes_where_its_rank_computes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert list_accelerators(model) == ()
    check_places((), OWN, FSDP, exact=True)
    check_places(OWN[:1], OWN, FSDP, exact=True)
    assert place(nn.Linear(2, 2), torch.device("meta")).weight.is_meta


def test_a_model_on_several_devices_is_one_for_ddp_on_those_of_its_rank() -> None:
    check_places(OWN, OWN, DDP, exact=False)
    other = torch.device("cuda", 0)
    for places, split, more, words in (
        ((other, OWN[0]), DDP, {}, "lies on cuda:0 and cuda:2, and this rank has cuda:2 and cuda:3"),
        (OWN, FSDP, {}, "parallel fsdp takes a model on one"),
        (OWN, Split("zero1", DDP.rows), {}, "parallel zero1 takes a model on one"),
        (OWN, DDP, {"exact": True}, "exact mode takes a model on one"),
    ):
        with pytest.raises(RequestError) as caught:
            check_places(places, OWN, split, **{"exact": False, **more})
        assert words in caught.value.message
