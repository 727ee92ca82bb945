"""Run the versions for Accelerate and Fabric on 1 and 2 ranks (CPU), and print what becomes of each: `peers.py [KIND]`.

They come from PyPI into .peers/lines, which takes torch from this Python's environment. "full" is stopped after its
first step on 2 ranks, resumed on 1, and compared with the same script undisturbed on 1 and with plain.py, with the data
in order (`shuffle=False`), since each tool shuffles in its own way. Exits 1 if a script fails or that result differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from count import HERE, KINDS

VENV = HERE.parents[1] / ".peers/lines"
SAME = 1e-5  # weights after training in float32; sums of two ranks are rounded in another order


def install() -> None:
    """Both packages into an environment that sees the packages of this one."""
    if not (VENV / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        for packages in VENV.glob("lib/python*/site-packages"):
            (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    pip = [str(VENV / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "accelerate", "lightning-fabric"], check=True)


def command(script: Path, ranks: int) -> list[str]:
    """How the tool's own documentation starts so many ranks on this machine."""
    if script.stem.startswith("with_fabric"):
        launcher = [str(VENV / "bin/fabric"), "run", "--accelerator", "cpu", "--strategy", "ddp"]
        return [*launcher, "--devices", str(ranks), str(script)]
    if script.stem.startswith("with_accelerate"):
        launcher = [str(VENV / "bin/accelerate"), "launch", "--cpu", "--num_machines", "1", "--mixed_precision", "no"]
        launcher += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "--main_process_port", "0"]
        return [*launcher, "--num_processes", str(ranks), str(script)]
    return [sys.executable, str(script)]


def train(script: Path, ranks: int, folder: Path, env: Mapping[str, str]) -> tuple[str | None, dict[str, torch.Tensor]]:
    """Why it failed, in one line, or None; and the weights that it saved, if any."""
    saved = folder / "model.pt"
    saved.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    ran = subprocess.run(command(script, ranks), cwd=folder, env=env, capture_output=True, text=True)
    if ran.returncode != 0:
        errors = [line for line in (ran.stderr or ran.stdout).splitlines() if "Error" in line]
        return (errors or [f"status {ran.returncode}"])[0].strip(), {}
    return None, torch.load(saved) if saved.exists() else {}


def difference(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((some[name] - others[name]).abs().max().item() for name in some | others)


def make_comparable(script: Path, folder: Path) -> Path:
    """The same script with the data in order, in float32: in float16 small differences grow."""
    text = script.read_text(encoding="utf-8").replace("shuffle=True", "shuffle=False")
    copy = folder / script.name
    copy.write_text(text.replace("dtype=torch.float16", "enabled=False"), encoding="utf-8")
    return copy


def try_full(kind: str, folder: Path) -> str | None:
    """Stop on 2 ranks, resume on 1: why the result is not that of an undisturbed run and of plain.py, or None."""
    script = make_comparable(HERE / kind / "with_accelerate_full.py", folder)
    runs = {name: folder / name for name in ("whole", "stopped")}
    for run in runs.values():
        run.mkdir()
    results = []
    for name, ranks, deadline in (("whole", 1, "inf"), ("stopped", 2, "0"), ("stopped", 1, "inf")):
        why, weights = train(script, ranks, folder, {"RUN_DIR": str(runs[name]), "DEADLINE": deadline})
        if why or bool(weights) is (deadline == "0"):
            return why or f"did not {'stop' if weights else 'finish'}"
        results.append(weights)
    if kind == "gan":  # its noise depends on the ranks
        return None
    _, plain = train(make_comparable(HERE / kind / "plain.py", folder), 1, folder, {})
    for what, other in (("undisturbed", results[0]), ("plain.py", plain)):
        if (found := difference(results[2], other)) > SAME:
            return f"resumed, the weights differ from {what} by {found:.2g}"
    return None


def main() -> int:
    install()
    failed = 0
    for kind in sys.argv[1:] or KINDS:
        outcomes = {}
        for version in ("with_accelerate", "with_fabric"):
            for ranks in (1, 2):
                with tempfile.TemporaryDirectory() as folder:
                    outcomes[f"{version}, {ranks}"], _ = train(HERE / kind / f"{version}.py", ranks, Path(folder), {})
        with tempfile.TemporaryDirectory() as folder:
            outcomes["with_accelerate_full, 2 then 1"] = try_full(kind, Path(folder))
        for what, why in outcomes.items():
            print(f"{kind:16}{what:32}{why or 'ok'}", flush=True)
            failed += why is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
