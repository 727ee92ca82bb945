"""A host's name on the network that ranks meet on, by the site's recipe, and what of this host leads there."""

from __future__ import annotations

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.interfaces import address_toward, interface_of, list_interfaces, usable_addresses
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.predict import predict_environment
from hpcddp.ranks.reach import find_local_address, reached_as
from hpcddp.ranks.rendezvous import Rendezvous
from hpcddp.schedulers.allocation import is_alias

HSN = ".hsn.cm.aurora.alcf.anl.gov"


@pytest.mark.parametrize(
    ("host", "suffix", "name"),
    [
        ("node1", "", "node1"),
        ("node1", "i", "node1i"),
        ("node1.cluster", "i", "node1i"),
        ("node1i", "i", "node1i"),
        ("node1i.cluster", "i", "node1i.cluster"),
        ("delphi", "i", "delphii"),
        ("node1", "-ib0", "node1-ib0"),
        ("x4204c0s0b0n0", HSN, f"x4204c0s0b0n0{HSN}"),
        (f"x4204c0s0b0n0{HSN}", HSN, f"x4204c0s0b0n0{HSN}"),
        ("x4204c0s0b0n0.other", HSN, f"x4204c0s0b0n0{HSN}"),
        ("10.0.0.7", "i", "10.0.0.7"),
        ("fd00::7", "i", "fd00::7"),
        ("localhost", "i", "localhost"),
    ],
)
def test_a_suffix_or_a_domain_makes_the_name_on_the_other_network(host: str, suffix: str, name: str) -> None:
    assert reached_as(host, {"HPCDDP_HOST_SUFFIX": suffix}) == name
    assert is_alias(name, host), "the node list still knows it"


@pytest.mark.parametrize("suffix", ["0", "-", "i;", "i i", "..", "$(id)"])
def test_a_suffix_that_no_host_name_can_end_in_is_refused(suffix: str) -> None:
    with pytest.raises(LaunchError, match="cannot be the end of a host's name"):
        reached_as("node1", {"HPCDDP_HOST_SUFFIX": suffix})


def meet(launcher: str, rank: int = 3, hosts: tuple[str, ...] = ("node1", "node2"), **more: str) -> Rendezvous:
    env = predict_environment(launcher, list(hosts), [4 // len(hosts)] * len(hosts), rank) | more
    return Launch(env, hosts[0] if rank == 0 else None, live=False).rendezvous


@pytest.mark.parametrize("rank", [0, 3])
def test_the_launchers_host_is_called_by_its_name_on_the_other_network(rank: int) -> None:
    found = meet("srun", rank, HPCDDP_HOST_SUFFIX="i")
    assert found.master_addr == "node1i"
    assert found.source["master_addr"] == "SLURM_STEP_NODELIST (first host), with HPCDDP_HOST_SUFFIX=i"


@pytest.mark.parametrize(("given", "address"), [("node1i", "node1i"), ("node1", "node1"), ("node2i", "node1i")])
def test_a_master_addr_with_the_suffix_is_verified_against_the_node_list(given: str, address: str) -> None:
    assert meet("srun", MASTER_ADDR=given, HPCDDP_HOST_SUFFIX="i").master_addr == address


def test_rank_0_is_called_by_its_address_on_the_sites_interface() -> None:
    assert find_local_address({}, "node1") == "node1"
    assert find_local_address({"HPCDDP_HOST_SUFFIX": "i"}, "node1") == "node1i"
    named = [i for i in list_interfaces() if i.is_global]
    for interface in named:
        assert find_local_address({"HPCDDP_INTERFACE": interface.name}, "node1") in usable_addresses(
            named, interface.name
        )


@pytest.mark.parametrize(("name", "fault"), [("hsn9", "is none of its interfaces"), ("lo", "has no address")])
def test_an_interface_that_leads_nowhere_is_refused(name: str, fault: str) -> None:
    with pytest.raises(LaunchError, match=f"interface {name} .*on node1 {fault}"):
        find_local_address({"HPCDDP_INTERFACE": name}, "node1")


def test_the_interfaces_of_this_machine() -> None:
    found = list_interfaces()
    assert interface_of("127.0.0.1", found) == "lo"
    assert interface_of("203.0.113.7", found) is None  # RFC 5737: nobody's
    assert usable_addresses(found, "lo") == []
    assert address_toward("127.0.0.1") == "127.0.0.1"
    assert address_toward("no-such-host.invalid") is None
    if ("lo", "::1") in [(i.name, i.address) for i in found]:
        assert address_toward("::1") == "::1"
        assert interface_of("0:0:0:0:0:0:0:1", found) == "lo"
