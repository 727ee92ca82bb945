"""What the cluster needs from Debian, installed if it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess

# libpmix-dev, because Slurm's pmix plugin opens libpmix.so, without a version, which only that package has.
PACKAGES = ("slurm-wlm", "munge", "libpmix-dev", "iproute2", "util-linux", "procps", "libfaketime")


def missing_packages() -> list[str]:
    query = ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *PACKAGES]
    said = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return [name for name in PACKAGES if f"{name} installed" not in said]


def install_packages() -> None:
    if not shutil.which("apt-get"):
        raise SystemExit("cluster: no apt-get, and packages of Debian 12 are needed\nhint: use a Debian container")
    missing = missing_packages()
    if not missing:
        return
    print(f"installing {' '.join(missing)}", flush=True)
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=True, env=quiet)
    # The daemons that Debian would start belong to the machine; ours run inside the hosts only.
    policy = "/usr/sbin/policy-rc.d"
    own_policy = not os.path.exists(policy)
    if own_policy:
        with open(policy, "w", encoding="ascii") as out:
            out.write("#!/bin/sh\nexit 101\n")
        os.chmod(policy, 0o755)
    try:
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        subprocess.run(install, check=True, env=quiet, stdout=subprocess.DEVNULL)
    finally:
        if own_policy:
            os.unlink(policy)
