"""What the commands cost to start: CPU time of whole processes, against a baseline from the same run.

A login node is shared, so what counts is CPU time (user + system), not the clock. The commands run in turn, round after
round, so that a busy moment meets all of them; medians are compared ("of least": the fastest round of each).
File-system calls are counted with strace, if there is one: on a parallel file system each may cost a millisecond.
Usage: startup.py [--rounds N] [--check]; --check exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcddp import guard
from hpcddp.cli.render import build_parser
from hpcddp.cli.request import read_plan
from hpcddp.script.site_file import find_data_folder

SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
HERE = Path(__file__).parent
SCRIPTS = Path(sys.executable).parent
SITE = "abci3"
REQUEST = ["--site", SITE, "--account", "gaa50000", "--nodes", "3", "--walltime", "1:00:00", "--", "python", "train.py"]
# command, its baseline, the largest allowed ratio of CPU times
TARGETS = [
    ("hpcddp --help", "python -c pass", 3.0),
    ("hpcddp env", "python -c pass", 3.0),
    ("hpcddp render", "bare render", 1.0),
    ("with the guard", "without it", 1.5),  # python -c pass in a rank of hpcddp exec: 5 ms of about 12
]
RANK = ["RANK=0", "WORLD_SIZE=2", f"{guard.AGENT_NAMES}=a b c d e"]
MORE_FILE_CALLS = 400  # that render may make beyond the bare one


def clean_environment() -> dict[str, str]:
    """No launcher's variables, no site chosen by somebody's shell."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def cpu_ms(argv: list[str], cwd: str) -> float:
    """User and system time of one process and its children, in milliseconds. It must succeed."""
    process = subprocess.Popen(argv, cwd=cwd, env=clean_environment(), **SILENT)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(argv)} failed with status {process.returncode}")
    return (used.ru_utime + used.ru_stime) * 1000


def file_calls(argv: list[str], cwd: str) -> int | None:
    """How many system calls with a file name it makes, or None without strace."""
    if shutil.which("strace") is None:
        return None
    with tempfile.NamedTemporaryFile("r") as log:
        traced = ["strace", "-f", "-qq", "-e", "trace=%file", "-o", log.name, *argv]
        subprocess.run(traced, cwd=cwd, env=clean_environment(), check=True, **SILENT)
        return sum(" resumed>" not in line for line in log)


def commands(job_file: Path) -> dict[str, list[str]]:
    """Each command line by its short name; `job_file` gets the planned values for the bare render."""
    hpcddp = str(SCRIPTS / "hpcddp")
    args = build_parser().parse_args(REQUEST[: REQUEST.index("--")])
    args.command = REQUEST[REQUEST.index("--") + 1 :]
    planned = as_data(read_plan(args, clean_environment()))
    job_file.write_text(json.dumps(planned, default=lambda _: None))
    templates = Path(find_data_folder("templates"))
    bare = [str(HERE / "bare_render.py"), str(templates), str(templates / f"sites/{SITE}.yaml"), str(job_file)]
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "without it": ["env", *RANK, sys.executable, "-c", "pass"],
        "with the guard": ["env", *RANK, f"PYTHONPATH={guard.__path__[0]}", sys.executable, "-c", "pass"],
        "hpcddp --help": [hpcddp, "--help"],
        "hpcddp env": [hpcddp, "env"],
        "bare render": [sys.executable, *bare],
        "hpcddp render": [hpcddp, "render", *REQUEST],
    }


def as_data(value: object) -> object:
    """Frozen values as JSON, with what they work out: a template may print either. Functions of rows are left out."""
    if isinstance(value, Mapping):
        return {key: as_data(item) for key, item in value.items()}
    names = [*getattr(value, "_fields", ())]
    if names:
        names += [name for name, item in vars(type(value)).items() if isinstance(item, property)]
        return {name: as_data(getattr(value, name)) for name in names}
    return [as_data(item) for item in value] if isinstance(value, (tuple, list, Iterator)) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cwd:  # no hpcddp.yaml here
        (Path(cwd) / "train.py").touch()  # render looks for it
        argvs = commands(Path(cwd) / "job.json")
        for argv in argvs.values():  # byte code, compiled templates and disk cache
            cpu_ms(argv, cwd)
        rounds = [{name: cpu_ms(argv, cwd) for name, argv in argvs.items()} for _ in range(options.rounds)]
        calls = {name: file_calls(argvs[name], cwd) for name in ("bare render", "hpcddp render")}
    median = {name: statistics.median(one[name] for one in rounds) for name in argvs}
    least = {name: min(one[name] for one in rounds) for name in argvs}
    print(f"CPU time in ms, median of {options.rounds} rounds, Python {sys.version.split()[0]}\n")
    missed = 0
    print(f"{'command':16}{'ms':>8}{'baseline':>18}{'ms':>8}{'ratio':>8}{'of least':>10}{'target':>8}")
    for name, base, target in TARGETS:
        ratio, quietest = median[name] / median[base], least[name] / least[base]
        missed += ratio > target
        outcome = "ok" if ratio <= target else "MISSED"
        measured = f"{name:16}{median[name]:8.1f}{base:>18}{median[base]:8.1f}{ratio:8.2f}{quietest:10.2f}"
        print(f"{measured}{target:8.2f}  {outcome}")
    ours, bare = calls["hpcddp render"], calls["bare render"]
    if ours is None or bare is None:
        print("\nfile-system calls: not counted, there is no strace (apt-get install strace)")
    else:
        outcome = "ok" if ours - bare <= MORE_FILE_CALLS else "MISSED"
        missed += ours - bare > MORE_FILE_CALLS
        print(
            f"\nfile-system calls: render {ours}, bare {bare}, {ours - bare} more (target {MORE_FILE_CALLS})  {outcome}"
        )
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
