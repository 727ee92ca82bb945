"""Which interface gloo and NCCL are told, and that they are told none where they find it themselves."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from hpcddp.errors import LaunchError
from hpcddp.ranks.interfaces import Interface
from hpcddp.ranks.network import (
    HostNetwork,
    check_interface,
    choose_gloo_interface,
    choose_nccl_interface,
    describe_network,
    nccl_choice,
    set_interface,
)

LO = Interface("lo", "127.0.0.1", True, True, False)
LO6 = Interface("lo", "::1", True, True, False)


def up(name: str, address: str = "") -> Interface:
    return Interface(name, address or f"10.0.{len(name)}.{sum(map(ord, name)) % 250}", True, False)


ETH0, ETH1, IB0, HSN0, DOCKER = map(up, ("eth0", "eth1", "ib0", "hsn0", "docker0"))


def look(
    *interfaces: Interface, mine: str | None, toward: str | None, peer: str | None = "node2", wanted: str = ""
) -> HostNetwork:
    return HostNetwork("node1", mine, peer, toward, wanted, interfaces)


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
    seen: HostNetwork, name: str | None
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
def test_nccl_is_told_where_its_order_ends_elsewhere(seen: HostNetwork, value: str | None) -> None:
    choice = choose_nccl_interface(seen)
    assert (choice and choice[0]) == value


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> HostNetwork:
    """node1, whose way to node2 is by eth1."""
    view = look(LO, ETH0, ETH1, mine="127.0.1.1", toward="eth1")
    monkeypatch.setattr("hpcddp.ranks.network.describe_network", lambda _host, peer, _env: view._replace(peer=peer))
    return view


@pytest.mark.parametrize(
    ("backend", "env", "peer", "value", "is_said"),
    [
        ("gloo", {}, "node2", "eth1", True),
        ("nccl", {}, "node2", "=eth1", True),
        ("gloo", {"GLOO_SOCKET_IFNAME": "lo,eth0"}, "node2", "lo,eth0", False),
        ("nccl", {"NCCL_SOCKET_IFNAME": "eth"}, "node2", "eth", False),
        ("gloo", {}, None, "lo", False),
    ],
)
def test_an_interface_is_set_where_neither_a_user_nor_a_site_has_set_one(
    network: HostNetwork, backend: str, env: dict[str, str], peer: str | None, value: str, is_said: bool
) -> None:
    remark = set_interface(env, backend, "node1", peer)
    assert ([*env.values()], bool(remark)) == ([value], is_said)


@pytest.mark.parametrize(
    ("variable", "value", "is_right"),
    [
        *[("GLOO_SOCKET_IFNAME", value, False) for value in ("^lo", "eth", "eth0,nope", "nope")],
        *[("NCCL_SOCKET_IFNAME", value, True) for value in ("eth", "=eth0", "hsn,eth", "^lo", "^=eth0")],
        *[("NCCL_SOCKET_IFNAME", value, False) for value in ("=eth", "hsn", "^eth,lo", "^=lo,eth0,eth1")],
    ],
)
def test_a_name_that_leaves_no_interface_is_refused(
    network: HostNetwork, variable: str, value: str, is_right: bool
) -> None:
    said = nullcontext() if is_right else pytest.raises(LaunchError, match="names no interface of node1: it has lo")
    with said:
        check_interface(variable, value, network)


def test_this_machine_as_it_is() -> None:
    assert describe_network("localhost", None, {}).mine in {"127.0.0.1", "::1"}
    choice = choose_gloo_interface(describe_network("no-such-host.invalid", None, {}))
    assert choice == ("lo", "host name no-such-host.invalid resolves to no address of this host")
