"""Hosts made of Linux namespaces: `login`, and inside it node1 … nodeN, each with its own network, name and /tmp.

login's process namespace holds the nodes' namespaces, and its network holds the switch (a bridge). So the whole cluster
hangs on one process: when that ends, however it ends, the kernel takes everything down. Nothing outside is changed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]
DOMAIN = "cluster"
NETWORK = "10.66.0"
# One with IPv4; one with IPv6 alone; two: hosts' names belong to the first, on which nodes reach login and not each
# other, and names with an i to the second.
NETS = ("v4", "v6", "two")
NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")


def host_names(nodes: int) -> list[str]:
    return ["login", *(f"node{i}" for i in range(1, nodes + 1))]


def address_of(name: str) -> str:
    return f"{NETWORK}.{_number_of(name)}"


def addresses_of(name: str, net: str) -> list[str]:
    """The host's addresses, the first for its name, the second for its name with an i."""
    number = _number_of(name)
    return {"v6": [f"fd66::{number}"], "two": [address_of(name), f"10.67.0.{number}"]}.get(net, [address_of(name)])


def _number_of(name: str) -> int:
    return 1 if name == "login" else 10 + int(name.removeprefix("node"))


def _with_prefix(address: str) -> str:
    return f"{address}/64 nodad" if ":" in address else f"{address}/24"


def enter(state: Path, name: str) -> list[str]:
    """The command line prefix that runs a command on a host, for use outside the cluster."""
    login = ["nsenter", "-t", _read_pid(state, "login"), *NAMESPACES]
    if name == "login":
        return login
    return [*login, "nsenter", "-t", _read_pid(state, name), *NAMESPACES]


def up_hosts(state: Path, nodes: int, net: str = "v4") -> None:
    """Bring up login and the nodes; RuntimeError if one does not come."""
    names = host_names(nodes)
    for name in names:
        own = state / "hosts" / name
        own.mkdir(parents=True)
        (own / "hostname").write_text(f"{name}\n")
        (own / "addresses").write_text("".join(f"{_with_prefix(a)}\n" for a in addresses_of(name, net)))
    _write_etc(state / "etc", names, net)
    (state / "munge").mkdir(mode=0o755, exist_ok=True)
    _start(state, "login", [])
    login_pid = _wait_for_pid(state, "login")
    for name in names[1:]:
        _start(state, name, ["nsenter", "-t", login_pid, *NAMESPACES])
    for name in names[1:]:
        _wire(state, name, _wait_for_pid(state, name), addresses_of(name, net))


def down_hosts(state: Path) -> None:
    """End login's first process, and with it everything in the cluster. Also what a bring-up cut short has left."""
    pids = _first_processes(state, "login")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 300
    while any(map(_runs, pids)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} do not end after SIGKILL")
        time.sleep(0.02)
    shutil.rmtree(state / "hosts", ignore_errors=True)


def _write_etc(folder: Path, names: list[str], net: str) -> None:
    folder.mkdir(exist_ok=True)
    rows = ["127.0.0.1 localhost"]
    for name in names:
        first, *second = addresses_of(name, net)
        rows.append(f"{first} {name}.{DOMAIN} {name}")
        rows += [f"{address} {name}i.{DOMAIN} {name}i" for address in second or [first]]
    (folder / "hosts").write_text("\n".join(rows) + "\n")
    # No name server, and none is asked: a name that is not in hosts is unknown at once.
    (folder / "resolv.conf").write_text("")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")


def _start(state: Path, name: str, inside: list[str]) -> None:
    keep = [str(CHECKOUT)] if CHECKOUT.is_relative_to("/tmp") else []
    unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child"]
    with (state / "log" / f"host-{name}.log").open("w") as log:
        subprocess.Popen(
            [*inside, *unshare, "bash", str(HERE / "host.sh"), str(state), name, *keep],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )


def _wire(state: Path, name: str, pid: str, addresses: list[str]) -> None:
    script = " && ".join(
        f"ip link add {name}-{i} type veth peer name eth{i} netns {pid} && ip link set {name}-{i} master br{i} up"
        f" && nsenter -t {pid} --net ip addr add {_with_prefix(address)} dev eth{i}"
        f" && nsenter -t {pid} --net ip link set eth{i} up"
        + (f" && ip link set {name}-{i} type bridge_slave isolated on" if i + 1 < len(addresses) else "")
        for i, address in enumerate(addresses)
    )
    subprocess.run([*enter(state, "login"), "sh", "-c", script], check=True)


def _wait_for_pid(state: Path, name: str) -> str:
    deadline = time.monotonic() + 300
    while not (state / "hosts" / name / "pid").exists():
        if time.monotonic() > deadline:
            said = (state / "log" / f"host-{name}.log").read_text()
            raise RuntimeError(f"host {name} did not come up: {said}")
        time.sleep(0.01)
    return _read_pid(state, name)


def _read_pid(state: Path, name: str) -> str:
    try:
        return (state / "hosts" / name / "pid").read_text().strip()
    except OSError:
        raise SystemExit(f"cluster: no host named {name!r} is up\nhint: tests/cluster/cluster up") from None


def _first_processes(state: Path, name: str) -> list[int]:
    """The `unshare` that made a host and the host's process 1, found by their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended meanwhile
        at = next((i for i, word in enumerate(words) if word.endswith("/bringup/host.sh")), None)
        if at is not None and words[at + 1 : at + 3] == [str(state), name]:
            found.append(int(folder.name))
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
