"""Which interface gloo and NCCL are told, and that they are told none where they find it themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.interfaces import Interface
from hpcddp.ranks.network import (
    Look,
    check_gloo_interface,
    choose_gloo_interface,
    choose_nccl_interface,
    look_around,
    nccl_choice,
    settle_interface,
)

LO = Interface("lo", "127.0.0.1", True, True, False)
LO6 = Interface("lo", "::1", True, True, False)


def up(name: str, address: str = "") -> Interface:
    return Interface(name, address or f"10.0.{len(name)}.{sum(map(ord, name)) % 250}", True, False)


ETH0, ETH1, IB0, HSN0, DOCKER = map(up, ("eth0", "eth1", "ib0", "hsn0", "docker0"))


def look(
    *interfaces: Interface, mine: str | None, toward: str | None, peer: str | None = "node2", wanted: str = ""
) -> Look:
    return Look("node1", mine, peer, toward, wanted, interfaces)


@pytest.mark.parametrize(
    ("seen", "name"),
    [
        (look(LO, ETH0, mine=ETH0.address, toward="eth0"), None),
        (look(LO, ETH0, mine="127.0.1.1", toward="eth0"), "eth0"),
        (look(LO, ETH0, mine=None, toward="eth0"), "eth0"),
        (look(LO, ETH0, mine="127.0.1.1", toward=None), None),
        (look(LO, ETH0, HSN0, mine=ETH0.address, toward="hsn0"), "hsn0"),
        (look(LO, ETH0, HSN0, mine=ETH0.address, toward="eth0", wanted="hsn0"), "hsn0"),
        (look(LO, ETH0, HSN0, mine=HSN0.address, toward="eth0", wanted="hsn0"), None),
        (look(LO, ETH0, mine="127.0.1.1", toward=None, peer=None), "lo"),
        (look(LO, ETH0, mine=ETH0.address, toward=None, peer=None), None),
        (look(LO, up("eth0", "fd00::1"), mine="fd00::1", toward="eth0"), None),
    ],
)
def test_gloo_is_told_the_interface_toward_the_others_where_its_own_choice_is_another(
    seen: Look, name: str | None
) -> None:
    choice = choose_gloo_interface(seen)
    assert (choice and choice[0]) == name


@pytest.mark.parametrize(
    ("interfaces", "first"),
    [
        ((LO, ETH0, IB0), "ib0"),
        ((LO, DOCKER, ETH0), "eth0"),
        ((LO, up("virbr0"), DOCKER), "docker0"),
        ((LO, up("virbr0")), "lo"),
        ((LO6, up("virbr0")), "virbr0"),
        ((LO, ETH0._replace(is_up=False), ETH1), "eth1"),
        ((LO, up("br-1a2b"), ETH0), "br-1a2b"),
        ((), None),
    ],
)
def test_nccls_own_order(interfaces: tuple[Interface, ...], first: str | None) -> None:
    assert nccl_choice(interfaces) == first


@pytest.mark.parametrize(
    ("seen", "value"),
    [
        (look(LO, ETH0, ETH1, mine=ETH1.address, toward="eth1"), "=eth1"),
        (look(LO, ETH0, ETH1, mine=ETH0.address, toward="eth0"), None),
        (look(LO, ETH0, DOCKER, mine=ETH0.address, toward="eth0"), None),
        (look(LO, ETH0, IB0, mine=ETH0.address, toward="eth0"), None),
        (look(LO, ETH0, IB0, HSN0, mine=ETH0.address, toward="eth0", wanted="hsn0"), "=hsn0"),
        (look(LO, up("br-1a2b"), ETH0, mine=ETH0.address, toward="eth0"), "=eth0"),
        (look(LO, up("br-1a2b"), ETH0, mine=ETH0.address, toward="eth0", peer=None), None),
        (look(LO, ETH0, ETH1, mine=None, toward=None), None),
    ],
)
def test_nccl_is_told_where_its_order_ends_elsewhere(seen: Look, value: str | None) -> None:
    choice = choose_nccl_interface(seen)
    assert (choice and choice[0]) == value


def test_what_a_user_or_a_site_has_set_is_left_alone(tmp_path: Path) -> None:
    seen = look(LO, ETH0, ETH1, mine="127.0.1.1", toward="eth1")
    assert settle_interface({"GLOO_SOCKET_IFNAME": "eth0"}, "gloo", seen) == (None, "")
    assert settle_interface({"NCCL_SOCKET_IFNAME": "eth"}, "nccl", seen) == (None, "")
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=eth0\n")
    assert settle_interface({"HOME": str(tmp_path)}, "nccl", seen) == (None, "")
    assert settle_interface({"HOME": ""}, "nccl", seen)[0] == ("NCCL_SOCKET_IFNAME", "=eth1")
    assert settle_interface({}, "gloo", seen)[0] == ("GLOO_SOCKET_IFNAME", "eth1")


def test_an_interface_is_set_without_a_remark_where_all_ranks_are_on_one_host() -> None:
    loopback = ("GLOO_SOCKET_IFNAME", "lo")
    assert settle_interface({}, "gloo", look(LO, ETH0, mine="127.0.0.1", toward=None, peer=None)) == (loopback, "")
    assert settle_interface({}, "gloo", look(LO, ETH0, mine="127.0.1.1", toward="eth0"))[1] != ""


@pytest.mark.parametrize("value", ["^lo", "eth", "eth0,nope", "nope"])
def test_a_gloo_interface_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(LaunchError, match="names no interface of node1: it has lo, eth0"):
        check_gloo_interface(value, "node1", (LO, ETH0))


def test_several_whole_names_are_fine_with_gloo() -> None:
    check_gloo_interface("lo,eth0", "node1", (LO, ETH0))


def test_this_machine_as_it_is() -> None:
    assert look_around("localhost", None, {}).mine in {"127.0.0.1", "::1"}
    choice = choose_gloo_interface(look_around("no-such-host.invalid", None, {}))
    assert choice == ("lo", "host name no-such-host.invalid resolves to no address of this host")
