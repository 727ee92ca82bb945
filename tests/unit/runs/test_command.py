"""What makes two commands the same, and what a run without a name is called."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from hpcddp.runs.command import identify_command, name_command


@pytest.mark.parametrize(
    "words",
    [
        "python train.py --lr 1",
        "python3 ./train.py --lr 1",
        "/opt/env/bin/python3.12 -u train.py --lr 1",
        "python -W ignore -X dev train.py --lr 1",
    ],
)
def test_the_interpreter_its_path_and_its_options_are_no_part_of_a_command(words: str) -> None:
    assert identify_command(words.split()) == ("python", "train.py", "--lr", "1")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("python train.py", "train"),
        ("python ./train.py", "train"),
        ("/opt/env/bin/python3.12 -u -W ignore train.py", "train"),
        ("python train.py --lr 0.1", "train-lr0.1"),
        ("python train.py --lr 0.1 --seed 2", "train-lr0.1-seed2"),
        ("python train.py --batch-size 32 --model resnet50 --amp", "train-batch-size32-model+resnet50-amp+"),
        ("python train.py --fp16 --beta1 0.9 --lr 1e-5", "train-fp16+-beta1+0.9-lr1e-5"),
        ("python fine-tune.py", "fine-tune"),
        ("python -m pkg.train", "pkg.train"),
        ("python -u -m pkg.train --epochs 4", "pkg.train-epochs4"),
        ("bash run.sh", "run"),
        ("bash -ex ./run.sh --fold 3", "run-fold3"),
        ("./run.sh", "run"),
        ("env OMP_NUM_THREADS=4 python train.py", "train"),
        ("torchrun --nproc-per-node 4 train.py --lr 1", "train-lr1"),
        ("torchrun --standalone --nproc-per-node=4 -m pkg.train --lr 1", "pkg.train-lr1"),
        ("python -m torch.distributed.run --nproc-per-node 4 train.py --lr 1", "train-lr1"),
        ("accelerate launch --config_file a.yaml train.py --lr 1", "train-lr1"),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", "train-deepspeed+ds.json"),
    ],
)
def test_a_run_is_called_after_its_program_and_options_where_the_name_says_all_of_them(words: str, name: str) -> None:
    assert name_command(words.split()) == name


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("python exp1/train.py", "exp1-train"),
        ("./solve", "solve"),
        ("solve", "solve"),
        ("run.sh", "run.sh"),  # of PATH: `./run.sh` is the one here
        ("python /home/me/project/train.py", "project-train"),
        ("python 01_train.py", "job-01_train"),
        ("python a.b.py", "a.b"),
        ("python -m train", "train"),
        ("/apps/bin/solve", "solve"),
        ("python -c print(1)", "python-c"),
        ("bash -c ls", "bash-c-ls"),
        ("python train.py lr=0.1 model=big", "train-lr-0.1-model-big"),
        ("python train.py --lr=0.1", "train-lr-0.1"),
        ("python train.py --lr -0.1", "train-lr+-0.1"),
        ("python train.py --data /data/imagenet/", "train-data+imagenet"),
        ("python train.py --lr {lr} --out {run_dir}", "train-lr+lr-out+run_dir"),
        ("python train.py --out $PBS_JOBID", "train-out+"),
        ("python train.py --x a.1", "train-x+a.1"),  # index 1 of an array of `--x a`
        ("python train.py --beef 123456", "train-beef123456"),  # it ends as a digest does
        ("python train-gpt.py --lr 1", "train-gpt-lr1"),  # `train.py --gpt-lr 1`
        ("python train.py --lr1-x", "train-lr1-x"),  # `train.py --lr 1 --x`
        ("python train.py --api-key SESAME --lr 1", "train-api-key-lr1"),
        ("python train.py --hf_token=SESAME", "train-hf_token"),
        ("python train.py +model.apiKey=SESAME", "train-+model.apiKey"),
        ("python train.py --url https://me:SESAME@host", "train-url+"),
        ("", "job"),
    ],
)
def test_a_digest_follows_a_name_that_does_not_say_all_words(words: str, shown: str) -> None:
    name = name_command(words.split())
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_.+-]*-[0-9a-f]{10}", name)
    assert name[:-11] == shown.rstrip("+")


def test_the_page_shows_the_names_that_commands_get(repo: Path) -> None:
    table = (repo / "docs/job-file.md").read_text().partition("\n## Names\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| `(.+)` \| `(\S+)` \|$", table)
    shown = [(words, name) for commands, name in rows for words in commands.split("`, `")]
    assert len(shown) >= 5
    assert [(words, name_command(words.split())) for words, _ in shown] == shown


@pytest.mark.parametrize(("words", "single"), [("--lr 0", "--lr 0.1"), ("--fp16", "--fp16.1"), ("--x 2", "--x 2.1")])
def test_the_index_of_an_array_is_no_decimal_of_a_value(words: str, single: str) -> None:
    array = name_command(["python", "train.py", *words.split()], indexed=True)
    assert name_command(["python", "train.py", *single.split()]) != f"{array}.1"
    assert name_command(["python", "train.py", "--amp"], indexed=True) == "train-amp+"


@pytest.mark.parametrize(
    "option", ["--token", "--hf-token", "--password", "--api_key", "--access-key", "--client-secret", "--apiKey"]
)
def test_the_value_of_a_secret_is_in_no_name_and_not_recorded(option: str) -> None:
    for words in ([option, "SESAME"], [f"{option}=SESAME"], [f"{option.lstrip('-')}=SESAME"]):
        assert "SESAME" not in name_command(["python", "train.py", *words])
        for start in (["python"], ["env", "A=1", "python"], ["./run.sh"]):
            recorded = identify_command([*start, "train.py", *words])
            assert "SESAME" not in " ".join(recorded)
            others = [word.replace("SESAME", "OTHER") for word in words]
            assert recorded != identify_command([*start, "train.py", *others]), "a digest compares as well"


_OPTIONS = (
    *("--lr", "--a", "--a-b", "--b", "--fp16", "--a1", "--a1-b", "--lr0", "--e", "--a-", "--_x", "--a--b"),
    *("-a", "---a", "--token", "--lr=1", "--", "--x.y"),
)
_VALUES = (
    *("0", "1", "0.1", "1e-5", "1e5", ".5", "1.", "1e", "e5", "a", "a.b", "a1", "a+b", "a-b", "a/b", "a b", "-1", ""),
    *("1-b", "1e-b", "2", "x.7", "ten.old1", "0123456789", "abcdefabcd", "é", "{lr}", "lr=1"),
)
_PROGRAMS = (
    *("train.py", "train-a.py", "train-a1.py", "train-lr0.py", "train.7.py", "a.b.py", "_x.py", "7.py", "d/train.py"),
    *("-m a.b", "-m train", "-m a.b1", "-m a.7", "train", "-m a-b.c"),
)


def _read(name: str) -> tuple[str, ...] | None:
    """The words of a name without a digest, by the rules of the page alone."""
    found = re.fullmatch(r"([A-Za-z][A-Za-z0-9_.]*)((?:-.*)?)", name)
    assert found is not None
    program = ("-m", found[1]) if "." in found[1] else (f"{found[1]}.py",)
    words: list[str] = []
    left = found[2]
    while left:
        option = re.match(
            r"-(?:([A-Za-z_-]*[A-Za-z_])([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)(?=-|$)|([A-Za-z0-9_-]+)\+([A-Za-z0-9_.]*))",
            left,
        )
        if option is None:
            return (f"{name}.py",) if not words else None
        words += [f"--{option[1] or option[3]}", *filter(None, [option[2] or option[4]])]
        left = left[option.end() :]
    return (*program, *words)


def test_a_name_without_a_digest_is_read_back_and_no_two_lists_of_words_share_one() -> None:
    chosen = random.Random(34)  # the same lists each time
    names: dict[str, tuple[str, ...]] = {}
    plain = 0
    for _ in range(6000):
        words = chosen.choice(_PROGRAMS).split()
        for _ in range(chosen.randrange(4)):
            words.append(chosen.choice(_OPTIONS if chosen.random() < 0.7 else _VALUES))
            words += [chosen.choice(_VALUES)] if chosen.random() < 0.6 else []
        name = name_command(["python", *words])
        assert names.setdefault(name, tuple(words)) == tuple(words)
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_.+-]{0,63}", name)
        assert not re.search(r"(\.old|[^0-9]\.)[0-9]+$", name)
        if not re.search("-[0-9a-f]{10}$", name):
            plain += 1
            assert _read(name) == tuple(words)
    assert plain > 300
