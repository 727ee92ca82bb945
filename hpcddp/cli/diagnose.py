"""`hpcddp diagnose`: why a job ended, by its logs and its scheduler's record."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from hpcddp.cli.parser import VerbParser
from hpcddp.cli.streams import print_answer, print_message
from hpcddp.diagnose.cause import Cause, cause_record, format_cause
from hpcddp.diagnose.judge import diagnose
from hpcddp.diagnose.reading import find_logs
from hpcddp.errors import RequestError
from hpcddp.login.find_cause import find_cause, find_cause_of_job
from hpcddp.login.find_run import find_run
from hpcddp.runs.folder import RUNS, RunFolder
from hpcddp.runs.start import is_run
from hpcddp.schedulers.job_id import parse_id

_DESCRIPTION = """\
Say why a job ended: the first cause, not the loudest; the rank at fault, the line that proves it, and what to type
next. `unknown` where nothing says why, `none` where nothing failed.

RUN is a name below runs/, a run's folder, or the id of one of its jobs: its ranks' logs, its state and its scheduler
are asked. JOBID is any other job of this machine's scheduler, of which only that is asked. LOG is a file, or a folder
of logs, of any job: nothing else is read, and nothing leaves this machine."""


def build_parser() -> VerbParser:
    example = "hpcddp diagnose train\nhpcddp diagnose slurm-4711.out\nhpcddp diagnose logs/ --json"
    parser = VerbParser("diagnose", _DESCRIPTION, example=example, exits=(2,))
    parser.usage = "hpcddp diagnose RUN | LOG ... | JOBID [--json]"
    parser.add_argument("words", nargs="+", metavar="RUN", help="a run, its job's id, or logs: files and folders")
    parser.add_argument("--json", action="store_true", help="print the cause as one JSON object")
    return parser


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    what, cause = _find(args.words, env)
    print_answer({"what": what, "cause": cause_record(cause)}, format_cause(cause, what), as_json=args.json)
    return 0


def _find(words: list[str], env: Mapping[str, str]) -> tuple[str, Cause]:
    """The name of what is diagnosed, and its cause."""
    first = words[0]
    is_path = [os.path.exists(word) and not is_run(RunFolder(word.rstrip("/"))) for word in words]
    named = os.path.exists(os.path.join(RUNS, first)) and "/" not in first
    if all(is_path) and not (len(words) == 1 and named and not os.path.isfile(first)):
        return first if len(words) == 1 else f"{len(words)} logs", diagnose(find_logs(words))
    if len(words) > 1:
        missing = next(word for word, there in zip(words, is_path, strict=True) if not there)
        raise RequestError(f"there is no log {missing}; of runs and jobs one is named", f"hpcddp diagnose {missing}")
    try:
        run = find_run(first)
    except RequestError:
        if not parse_id(first).is_job:
            raise
        return f"job {first}", find_cause_of_job(first, env)
    found = find_cause(run, env)
    for remark in found.remarks:
        print_message(remark)
    return run.path, found.cause
