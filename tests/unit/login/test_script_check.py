"""A training script is read before the queue: ranks that will never meet, and a chain that ends at its second job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.cli.main import main
from hpcddp.login.planning import plan_request
from hpcddp.login.script_check import check_training_script
from hpcddp.script.jobplan import JobPlan

REPO = Path(__file__).parents[3]
ALONE = """\
import torch
from model import Net
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(100):
    net(torch.ones(2, 1)).sum().backward()
    optimizer.step()
"""
MODEL = "from torch import nn\nclass Net(nn.Linear):\n    pass\n"


def plan_for(command: str, **more: str) -> JobPlan:
    asked = {"nodes": "2", "ranks_per_node": "2", "gpus_per_node": "2", "cpus_per_rank": "1", "walltime": "1h"} | more
    words = {key: (value, key) for key, value in {**asked, "launcher": "openmpi", "command": command.split()}.items()}
    return plan_request(words, "generic-slurm", None, {})


def remarks(command: str = "python train.py", **more: str) -> list[str]:
    return check_training_script(plan_for(command, **more), {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(ALONE)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    ["python train.py", "python -m train", "numactl -l python train.py --lr {per_rank_batch}", "torchrun train.py"],
)
def test_a_script_that_joins_no_ranks_is_told_before_the_queue(folder: Path, command: str) -> None:
    (remark,) = remarks(command, global_batch="256")
    assert remark.startswith(
        "train.py:7 takes optimizer steps, and nothing in the script joins its 4 ranks: each would"
    )
    assert "hint: hpcddp.runtime() and its loop (README.md), or init_process_group(), DistributedDataParallel" in remark


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("python train.py", {"nodes": "1", "ranks_per_node": "1"}),
        ("python train.py", {"independent": "true"}),
        ("python train.py", {"ranks": "node"}),
        ("python train.py --fold {rank}", {}),
        ("bash train.sh", {}),
        ("python -c import_train train.py", {}),
    ],
    ids=["one rank", "on purpose", "one per node", "told its rank", "a shell script", "code in the command"],
)
def test_ranks_that_need_not_meet_are_left_alone(folder: Path, command: str, more: dict[str, str]) -> None:
    assert remarks(command, **more) == []


@pytest.mark.parametrize(
    ("command", "is_told"),
    [
        ("env -i python rt.py", True),
        ("/usr/bin/env - A=1 numactl -l /opt/bin/python3.12 -u rt.py", True),
        ("env -u B -vi A=1 torchrun rt.py", True),
        ("env --ignore-environment A=1 python -m other", True),
        ("env -i RANK=0 python rt.py", False),
        ("env -i python rt.py --rank {rank}", False),
        ("env -u A python rt.py", False),
        ("env A=1 python rt.py -i -", False),
        ("env -i ./a.out", False),
        ("python rt.py env -i python", False),
    ],
)
def test_an_env_that_clears_the_ranks_variables_is_told(folder: Path, command: str, is_told: bool) -> None:
    (folder / "rt.py").write_text("import hpcddp\n")
    told = [one for one in remarks(command) if one.startswith("env -i hides from the program which of the 4 ranks")]
    assert bool(told) is is_told
    assert remarks(command, independent="true") == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("train.py", "import torch.distributed as dist"),
        ("train.py", "from accelerate import Accelerator"),
        ("train.py", "import lab_tools"),
        ("train.py", "from transformers import Trainer"),
        ("train.py", "import subprocess"),
        ("train.py", "import os; os.execv('x', [])"),
        ("train.py", "exec(open('rest.py').read())"),
        ("train.py", "import os; fold = os.environ['SLURM_PROCID']"),
        ("train.py", "parser.add_argument('--local-rank')"),
        ("train.py", "print('unfinished'"),
        ("model.py", "from torch.nn.parallel import DistributedDataParallel"),
        ("model.py", "import hpcddp"),
        ("model.py", "from . import parts"),
        ("model.py", "from parts.setup import begin"),
    ],
)
def test_what_may_join_ranks_in_any_file_of_the_program_silences_it(folder: Path, file: str, line: str) -> None:
    (folder / "parts").mkdir()
    (folder / "parts/setup.py").write_text("from torch.distributed import init_process_group as begin\n")
    (folder / file).write_text(f"{(folder / file).read_text()}\n{line}\n")
    assert remarks() == []


@pytest.mark.parametrize(
    "line", ["import timm, wandb", "import os, random", "from parts.nets import Deep", "lora_rank = 8"]
)
def test_what_joins_none_does_not(folder: Path, line: str) -> None:
    (folder / "parts").mkdir()
    (folder / "parts/nets.py").write_text("from torch import nn\nDeep = nn.Sequential\n")
    (folder / "train.py").write_text(f"{ALONE}\n{line}\n")
    assert len(remarks()) == 1


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        ("python train.py", True),
        (
            "#!/bin/bash\n# a run\nset -eu\n\nmodule load cuda\nexport A=1 B=x\nexec python3 train.py -x $@\n",
            True,
        ),
        ('source venv/bin/activate\npython -u train.py \\\n  --lr 0.1 "$@"\n', True),
        ("cd elsewhere\npython train.py", False),
        ("python train.py --fold $SLURM_PROCID", False),
        ("export RANK=1\npython train.py", False),
        ("python train.py & python train.py", False),
        ("python train.py\npython test.py", False),
        ("torchrun train.py", False),
        ("if true; then\npython train.py\nfi", False),
        ("export A=$(python other.py)\npython train.py", False),
    ],
)
def test_a_plain_shell_scripts_program_is_read_and_no_others(folder: Path, text: str, is_read: bool) -> None:
    (folder / "run.sh").write_text(text)
    for command in ("bash run.sh", "./run.sh --lr 1", "sh -e run.sh"):
        assert [one[:10] for one in remarks(command)] == (["train.py:7"] if is_read else [])


def test_a_module_without_a_file_here_or_a_file_that_is_no_text_says_nothing(folder: Path) -> None:
    (folder / "model.py").unlink()
    assert remarks() == []
    (folder / "model.py").write_bytes(b"\xff\0")
    assert remarks() == []


def test_a_chain_of_a_script_that_saves_nothing_by_hpcddp_is_told(folder: Path) -> None:
    (folder / "train.py").write_text("from transformers import Trainer\nTrainer().train()\n")
    (remark,) = remarks(chain="5")
    assert remark.startswith("train.py saves nothing by hpcddp: it cannot stop before the walltime, and the second job")
    assert "hint: hpcddp.runtime(), or one line of hpcddp.integrations (docs/frameworks.md)" in remark
    (folder / "train.py").write_text("import hpcddp.integrations\nfrom transformers import Trainer\n")
    assert remarks(chain="5") == []
    (folder / "train.py").write_text("from transformers import Trainer\nimport lab_tools\n")
    assert remarks(chain="5") == [], "lab_tools may save by hpcddp"


def test_render_and_submit_and_launch_say_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--nodes", "2", "--gpus-per-node", "2", "--cpus-per-rank", "1", "--walltime", "1h", "--launcher", "srun"]
    request = ["--site", "generic-slurm", *size, "--", "python", "train.py"]
    for verb in (["render", *request], ["submit", "--dry-run", *request]):
        assert main(verb) == 0
        assert "train.py:7 takes optimizer steps" in capsys.readouterr().err
    assert main(["render", "--no-check", *request]) == 0
    assert "optimizer steps" not in capsys.readouterr().err


PLAN = plan_for("python train.py")
CHAIN = plan_for("python train.py", chain="5")


def right_scripts() -> Iterator[tuple[str, str]]:
    """All programs of jobs/ and of the tests, and all Python of the pages."""
    for pattern in ("jobs/**/*.py", "tests/*/programs/*.py"):
        for path in sorted(REPO.glob(pattern)):
            yield str(path.relative_to(REPO)), path.read_text()
    for page in (REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))):
        for number, block in enumerate(re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL), 1):
            yield f"{page.relative_to(REPO)}, {number}", block


@pytest.mark.parametrize(("name", "text"), [pytest.param(*one, id=one[0]) for one in right_scripts()])
def test_no_right_script_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    of_one_process = name == "jobs/plain/data_parallel.py"  # which its job says, too
    assert bool(check_training_script(PLAN, {})) is of_one_process
    told = check_training_script(CHAIN, {})
    assert not told or not re.search(r"^ *(import|from) hpcddp", text, re.MULTILINE), name
