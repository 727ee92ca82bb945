"""The rows of docs/strategies.md: each way to train that has a job in jobs/, and what the tests here find of it.

The tests fail where a row says what is not so; docs/make_strategies.py makes the page from the same rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

JOBS = Path(__file__).parents[2] / "jobs"


class Row(NamedTuple):
    name: str
    job: str  # below jobs/
    ranks: tuple[int, ...]  # it runs on each; the result on the first is the one that others are compared with
    equal_to: str  # "bits", or the largest difference of weights from one process; else why there is none
    resumes: str  # "yes", or why not
    stops: str  # "yes", or why not
    lint: tuple[str, ...] = ()  # what `hpcddp lint` says of the script on purpose
    command: str = ""  # a smaller one than the job's, for the test
    exact: str = ""  # what to add to the command for the comparison
    also: tuple[str, ...] = ()  # job files with the same program that need no run of their own


ABCI = "python train.py --data images --model resnet18 --side 32 --workers 0 --epochs 2"
ROWS = (
    Row(
        "the article's job on 1 and 4 nodes of ABCI 3.0",
        "abci/one-node.yaml",
        (1, 2),
        equal_to="bits",
        resumes="yes",
        stops="yes",
        command=ABCI,
        exact="--exact",
        also=("abci/four-nodes.yaml",),
    ),
)
