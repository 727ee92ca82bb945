"""Whether two names mean one host."""

from __future__ import annotations

from hpcddp.schedulers.allocation import is_alias, is_loopback, same_host


def test_hosts_are_one_if_their_first_labels_are() -> None:
    assert same_host("node001.hpc.test", "node001")
    assert same_host("Node1", "node1.")
    assert not same_host("node1", "node11")
    assert not same_host("10.0.0.1", "10.0.0.2")
    assert not same_host("10.0.0.1", "10")


def test_an_alias_is_the_host_on_another_network() -> None:
    assert all(is_alias(name, "node1.cluster") for name in ("node1", "node1-ib", "node1i", "node1.ib.cluster"))
    assert not any(is_alias(name, "node1") for name in ("node11", "node2", "ode1", "10.0.0.1"))


def test_loopback_is_whatever_can_only_mean_the_machine_itself() -> None:
    assert all(is_loopback(name) for name in ("localhost", "localhost.localdomain", "127.0.1.1", "::1", "0.0.0.0"))
    assert not any(is_loopback(name) for name in ("node127", "10.0.0.1", "localhost2"))
