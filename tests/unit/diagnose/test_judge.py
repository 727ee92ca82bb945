"""The first cause, by logs of real jobs and by short ones that show one rule each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hpcddp.diagnose.cause import ALL, Cause, cause_record, format_cause
from hpcddp.diagnose.job_record import add_record, judge_record
from hpcddp.diagnose.judge import diagnose
from hpcddp.diagnose.reading import find_logs
from hpcddp.errors import RequestError

CAPTURES = Path(__file__).parents[2] / "captures" / "failures"
LABELS = json.loads((CAPTURES / "labels.json").read_text(encoding="utf-8"))
RESET = "RuntimeError: [/gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.1.0.1]:4495. This is typically …"
LATE = (
    "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete"
)


def raised(rank: int | None, error: str, line: int = 7) -> str:
    """A traceback, as torch prints it of a rank."""
    mark = "" if rank is None else f"[rank{rank}]: "
    place = f'  File "/u/train.py", line {line}, in <module>'
    lines = ["Traceback (most recent call last):", place, "    step()", error]
    return "".join(f"{mark}{text}\n" for text in lines)


@pytest.fixture
def told(tmp_path):
    """The cause that logs of these texts give: one, or several by their names."""

    def tell(*text: str, has_failed: bool | None = None, **more: str) -> Cause:
        for name, content in {**{f"job{at}.out": one for at, one in enumerate(text)}, **more}.items():
            (tmp_path / name.replace("_", "-", 1).replace("_", ".")).write_text(content, encoding="utf-8")
        return diagnose(find_logs([str(tmp_path)]), has_failed=has_failed)

    return tell


@pytest.mark.parametrize("name", LABELS)
def test_a_real_log_has_its_cause_rank_and_line(name):
    class_, rank, proof = LABELS[name]
    place = CAPTURES / name if (CAPTURES / name).is_dir() else CAPTURES / f"{name}.log"
    cause = diagnose(find_logs([str(place)]))
    assert (cause.class_, cause.rank) == (class_, rank)
    assert proof is None or proof in cause.text
    if cause.line is not None:
        lines = Path(cause.file).read_bytes().decode(errors="replace").split("\n")
        assert cause.text in lines[cause.line - 1]


def test_a_peer_that_was_reset_does_not_win_over_the_cause_though_it_stands_first(told):
    cause = told(raised(0, RESET) + raised(1, "KeyError: 'label'") + raised(2, RESET))
    assert (cause.class_, cause.rank, cause.text) == ("exception", 1, "[rank1]: KeyError: 'label'")


def test_an_exception_that_was_caught_is_no_cause(told):
    caught = "2026-11-25 19:09:02,494 [rank 0] ERROR store: reading failed (attempt 1 of 3), will retry\n"
    on = "2026-11-25 19:09:03,000 [rank 0] INFO store: sum 18\n"
    assert told(caught + raised(None, "OSError: [Errno 28] No space left on device") + on + "done\n").class_ == "none"
    ignored = "Exception ignored in: <function f at 0x1>\n" + raised(None, "KeyError: 1")
    assert told(ignored + "done\n").class_ == "none"
    on = "".join(f"[rank {n % 2}] INFO step {n}\n" for n in range(6))
    assert told(on + raised(None, MISSING) + on + "done\n").class_ == "none"
    assert told(raised(1, "KeyError: 'label'") + on).class_ == "exception"  # torch signs what ends a rank


def test_of_alike_tracebacks_the_one_that_no_line_says_to_be_survived_is_the_cause(told):
    body = raised(None, "OSError: [Errno 5] Input/output error: '/x/7'").replace("<module>", "read")
    again = "".join(f"reading {n} failed (attempt {n} of 3), will retry\n{body}" for n in range(5))
    assert told(again + "rank 0 done\n").class_ == "none"
    cause = told(again + "reading 5 failed\n" + body)
    assert (cause.class_, cause.line) == ("exception", 30)


CAUGHT = raised(None, "ModuleNotFoundError: No module named 'wandb'")
EPOCHS = "epoch 0 loss 1.0\nepoch 1 loss 0.5\n"
OF_3 = "".join(f"rank {n} of 3 on node{n}\n" for n in range(3))
STATUS_3 = "srun: error: node2: task 1: Exited with exit code 3\n"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (CAUGHT + EPOCHS + "done\n", "none"),
        (CAUGHT + "training failed\n", "import"),  # no line comes twice
        (CAUGHT + OF_3 + EPOCHS, "import"),  # no more often than there are ranks
        (CAUGHT + OF_3 + 2 * EPOCHS + "done\n", "none"),
        (CAUGHT + EPOCHS + raised(None, "KeyError: 'label'"), "exception"),
        ("/bin/sh: 1: nvidia-smi: not found\n" + 2 * EPOCHS + "batch 7 does not divide\n" + STATUS_3, "exit-status"),
        (CAUGHT + EPOCHS + "JOB 7 ON node1 CANCELLED AT 2026-11-26T06:45:29 DUE TO TIME LIMIT ***\n", "walltime"),
        (CAUGHT + raised(1, "KeyError: 'label'"), "exception"),  # torch signs what ends a rank
        (OF_3 + 3 * CAUGHT + raised(None, "PermissionError: /x"), "permission"),  # each rank ends once
        (OF_3 + 2 * CAUGHT + raised(None, "PermissionError: /x"), "import"),
        (OF_3 + 2 * CAUGHT + raised(None, "PermissionError: /x") + CAUGHT, "permission"),  # all have raised the other
        (OF_3 + CAUGHT + EPOCHS + "srun: error: node2: task 1: Segmentation fault\n", "crash"),
        (CAUGHT + OF_3 + EPOCHS + "nan, stopping\n" + raised(0, RESET) + raised(2, RESET) + STATUS_3, "exit-status"),
    ],
)
def test_an_exception_behind_which_lines_come_more_often_than_there_are_ranks_was_caught(told, log, cause):
    assert told(log).class_ == cause


@pytest.mark.parametrize(
    "again",
    [
        "hpcddp: start 2 of at most 4 on node1",
        "W1125 x.py:1] Worker group FAILED. 2/3 attempts left; will restart worker group",
    ],
)
def test_of_ranks_that_were_started_again_the_last_start_counts(told, again):
    first = raised(1, "KeyError: 'label'") + f"{again}\n"
    assert told(first + "[rank 1] INFO done\n").class_ == "none"
    cause = told(first + raised(0, "OSError: [Errno 28] No space left on device") + raised(1, RESET))
    assert (cause.class_, cause.rank) == ("disk-full", 0)


def test_of_a_job_script_that_tries_again_the_last_attempt_counts(told):
    ended = (
        "E1126 16:27:23.572000 51 torch/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 57) of binary: python3\n"
    )
    first = ">>> attempt 1 (16:26)\n" + raised(1, "KeyError: 'label'") + ended + ">>> attempt 1 failed\n"
    second = ">>> attempt 2 (16:27)\n" + raised(0, "OSError: [Errno 28] No space left on device") + ended
    assert told(first + second).class_ == "disk-full"
    assert told(first.replace("attempt 1 failed", "restart 1") + "rank 0 trained\nall done\n").class_ == "none"
    in_one = raised(1, "KeyError: 'label'") + "[rank0] connects, attempt 1\n[rank0] connects, attempt 2\n" + ended
    assert told(in_one).class_ == "exception"


def test_a_log_that_begins_inside_of_a_traceback_that_torch_signs_shows_its_exception(told):
    cut = "epoch 1\n" + raised(3, "KeyError: 'label'").split("\n", 1)[1]
    cause = told(cut + "srun: error: node1: task 3: Exited with exit code 1\n")
    assert (cause.class_, cause.rank) == ("exception", 3)
    assert cause.text.endswith("KeyError: 'label'")


WHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"
DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: '/x'"
WORKER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."


@pytest.mark.parametrize(
    ("first", "link", "then", "source", "text"),
    [
        (MISSING, DIRECT, "RuntimeError: cannot prepare", "step()", MISSING),  # a row names it
        (MISSING, WHILE, "RuntimeError: cannot prepare", "raise RuntimeError", MISSING),
        ("KeyError: 3", WHILE, "BadShard: shard 3 is not there", "raise BadShard", "BadShard: shard 3 is not there"),
        ("KeyError: 3", WHILE, MISSING, "raise FileNotFoundError", MISSING),
        ("KeyError: 3", WHILE, MISSING, "os.remove(lock)", "KeyError: 3"),  # the handler failed
        (RESET, WHILE, MISSING, "torch.save(model)", None),
        (RESET, WHILE, WORKER, "_error_if_any_worker_fails()", WORKER),  # torch runs it at a worker's end
        (RESET, DIRECT, "RuntimeError: training failed", "raise RuntimeError", None),
    ],
)
def test_of_exceptions_that_led_to_one_another_what_a_handler_ran_into_does_not_count(
    told, first, link, then, source, text
):
    last = raised(None, then).replace("step()", source)
    assert told(raised(None, first) + link + last).text == (text or "")


def test_of_several_files_the_times_say_which_came_first(told):
    def log(second: int, rank: int, error: str) -> str:
        return f"2026-11-25 18:39:{second:02d},000 [rank {rank}] INFO step\n{raised(rank, error)}"

    cause = told(rank_0000_node1_log=log(30, 0, "KeyError: 1"), rank_0001_node2_log=log(20, 1, "IndexError: 2"))
    assert (cause.class_, cause.rank, cause.host) == ("exception", 1, "node2")


def test_a_rank_that_ended_itself_is_known_by_its_last_words_whatever_the_launcher_raised_then(told):
    words = "validation loss is nan, stopping\n"
    end = "E1126 x.py:1002] failed (exitcode: 3) local_rank: 1 (pid: 7) of binary: python\n"
    end += raised(None, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
    cause = told("step 1\nstep 2\n" + words + raised(0, RESET) + raised(2, RESET) + end)
    assert (cause.class_, cause.rank, cause.line, cause.text) == ("exit-status", 1, 3, words.strip())


def test_a_log_that_stops_in_the_middle_does_not_show_that_nothing_failed(told):
    steps = "".join(f"step {n} loss 0.{n}\n" for n in range(9))
    assert told(steps).class_ == "unknown"
    for end in ("training done\n", "step 10/10\n", "exit status 0\n"):
        assert told(steps + end).class_ == "none"
    for end in ("rank 1: loss is nan at step 4, stopping\n", 9 * "saved\n", "rank 0, MEMBER: 2/2\n"):
        assert told(steps + end).class_ == "unknown"


def test_the_first_task_that_ended_by_a_signal_was_killed_and_one_behind_its_launchers_sweep_was_not(told):
    left = "srun: error: node1: task 0: Exited with exit code 1\n"
    end = "srun: error: node3: task 2: Terminated\n"
    cause = told(raised(0, RESET) + end + left)
    assert (cause.class_, cause.rank, cause.text) == ("killed", 2, end.strip())
    swept = "srun: launch/slurm: _step_signal: Terminating StepId=10.0\n"
    assert told(raised(0, RESET) + swept + end + left).class_ != "killed"


INSIDE = raised(None, "KeyError: 'seed'").replace("<module>", "read")
IS_ON = (
    "config: 'lr' must be positive, aborting\nE1126 x.py:1] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: p\n"
)


@pytest.mark.parametrize(
    ("log", "class_"),
    [
        (INSIDE + "apex is not there, falling back to torch\n" + IS_ON, "exit-status"),
        ("r0: no cache, the default is used\n" + INSIDE + IS_ON, "exit-status"),
        ("2026-11-25 19:09:02 WARNING no seed\n" + INSIDE + IS_ON, "exit-status"),
        ("r0: no cache, the default is used\n" + raised(None, "KeyError: 'seed'"), "exception"),  # it ended there
        (INSIDE + "E1126 x.py:1] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: p\n", "exception"),
        (f"WARNING: {MISSING}\n" + IS_ON, "exit-status"),
    ],
)
def test_an_error_that_its_program_says_it_goes_on_after_is_no_cause(told, log, class_):
    assert told(log).class_ == class_


def test_nothing_that_says_why_is_unknown_and_a_log_without_a_failure_none(told):
    assert told(raised(0, RESET) + raised(1, RESET)).class_ == "unknown"
    assert told("step 1\nstep 2\n", has_failed=True).class_ == "unknown"
    assert told("step 1\ndone\n").class_ == "none"
    assert told("\n").class_ == "unknown"
    assert told(raised(1, "KeyError: 'x'").rpartition("[rank1]: Key")[0]).class_ == "unknown"  # it is cut off


def test_a_progress_bar_in_the_line_is_no_matter_and_the_piece_is_the_text(told):
    bar = "\repoch 0:   2%|▎         | 1/40 [00:00<00:14,  2.63it/s]\r"
    cause = told(f"[rank 0] INFO step\n{bar}{raised(1, 'KeyError: 5')}")
    assert (cause.rank, cause.line, cause.text) == (1, 5, "[rank1]: KeyError: 5")


def test_a_word_of_a_log_does_not_become_a_command_or_move_a_terminal(told):
    line = "[proxy:0@n1] HYDU_create_process: execvp error on file $(reboot);x\x1b[2J (No such file or directory)\n"
    cause = told(line)
    assert "'$(reboot);x" in cause.remedy
    assert "\x1b" not in format_cause(cause, "job")
    assert cause_record(cause)["class"] == "command"


@pytest.mark.parametrize(
    ("of_logs", "why", "cause"),
    [
        ("host-memory", "no rank gets on; rank 1 on n2 stands at train.py:7", "hang"),  # the supervisor's SIGKILL
        ("exit-status", "rank 1 on n2 ended with status 0 while others still trained", "early-exit"),
        ("exception", "no rank gets on; rank 1 on n2 stands at train.py:7", "exception"),
        ("unknown", "TIMEOUT: TimeLimit", "walltime"),
        ("killed", "SIGTERM", "killed"),
    ],
)
def test_who_has_ended_the_ranks_knows_more_than_how_they_ended_and_less_than_their_errors(of_logs, why, cause):
    also = ("killed",) if of_logs == "host-memory" else ()
    assert add_record(Cause(of_logs, 1, also=also), why, None).class_ == cause


def test_a_signal_to_the_job_is_no_ranks_whichever_the_launcher_names():
    cause = add_record(Cause("killed", 1, "n2", "job.log", 2, "rank 1 exited on signal 15"), "SIGTERM", 143)
    assert (cause.class_, cause.rank, cause.host, cause.file, cause.text) == (
        "killed",
        None,
        "",
        "",
        "SIGTERM to the job",
    )


def test_of_a_line_without_end_only_both_ends_are_looked_at(told):
    cause = told("x" * 3_000_000 + raised(0, "KeyError: 1") + "KeyError " * 500_000)
    assert (cause.class_, cause.text) == ("exception", "[rank0]: KeyError: 1")


def test_a_folder_without_logs_and_a_file_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(RequestError, match="there is no log in"):
        find_logs([str(tmp_path)])
    (tmp_path / "a.out.gz").write_bytes(gzip.compress(b"KeyError: 1\n" * 9))
    with pytest.raises(RequestError, match="is no text"):
        diagnose(find_logs([str(tmp_path / "a.out.gz")]))
    with pytest.raises(RequestError, match="cannot be read"):
        diagnose(find_logs([str(tmp_path / "x.out")]))


CANCELLED = "slurmstepd: error: *** JOB 9 ON node1 CANCELLED AT 2026-11-26T06:46:18 ***\n"
STEP = "slurmstepd: error: *** STEP 9.0 ON node1 CANCELLED AT 2026-11-26T06:46:18 ***\n"


@pytest.mark.parametrize("end", [CANCELLED, CANCELLED.replace(" ***\n", " DUE TO TIME LIMIT ***\n")])
def test_a_job_that_its_scheduler_ends_after_a_rank_had_ended_badly_is_that_ranks(told, end):
    of = "".join(f"[rank {n}] INFO step\n" for n in range(3))
    cause = told(of + raised(0, LATE) + raised(2, LATE) + end + "srun: error: node2: task 1: Terminated\n")
    assert (cause.class_, cause.rank) == ("hang", 1)
    assert told(of + "srun: error: node2: task 1: Segmentation fault\n" + end).class_ == "crash"
    others = "srun: error: node2: task 1: Exited with exit code 1\n"
    assert told(of + end + others).class_ in {"killed", "walltime"}


def test_a_step_that_was_cancelled_before_any_rank_ended_was_killed_by_nobody_knows_whom(told):
    ends = "srun: error: node2: tasks 2-3: Killed\nsrun: error: node1: tasks 0-1: Killed\n"
    cause = told(STEP + ends)
    assert (cause.class_, cause.rank, cause.text) == ("killed", None, STEP.strip())
    cause = told("srun: error: node1: task 1: Killed\n" + STEP + "srun: error: node1: task 0: Terminated\n")
    assert (cause.class_, cause.rank) == ("host-memory", 1)


def test_the_same_words_of_all_ranks_before_the_same_status_are_of_all(told):
    ends = (
        "srun: error: node1: task 0: Exited with exit code 2\nsrun: error: node2: tasks 1-2: Exited with exit code 2\n"
    )
    cause = told(3 * "ERROR: unknown optimizer 'adanm'\n" + ends)
    assert (cause.class_, cause.rank, cause.text) == ("exit-status", "all", "ERROR: unknown optimizer 'adanm'")


def test_a_rank_that_ended_without_a_word_has_the_launchers_line(told):
    steps = "set up on node1\n" + "".join(f"step {n} loss 0.1\n" for n in range(5))
    end = "srun: error: node2: task 1: Exited with exit code 17\n"
    cause = told(f"{steps}{raised(0, RESET)}{end}srun: error: node1: task 0: Exited with exit code 1\n")
    assert (cause.class_, cause.rank, cause.text) == ("exit-status", 1, end.strip())


def test_the_launchers_sentence_is_no_message_of_the_rank_and_the_reason_counts_more_than_what_all_ranks_print(told):
    words = "rank 0: 2 files\nrank 1: the validation set is empty\nrank 1: 0 files\n"
    launcher = "prterun detected that one or more processes exited with non-zero status,\n"
    launcher += (
        "thus causing the job to be terminated. The first process to do so was:\n\n   Process name: [prterun-7@1,1]\n"
    )
    assert told(words + launcher).text == "rank 1: the validation set is empty"


def test_the_remedy_of_a_missing_module_names_it(told):
    assert "pip show wandb in" in told(CAUGHT).remedy


def test_what_only_tells_where_to_read_more_is_no_last_word(told):
    words = "Could not override 'lrr'.\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
    cause = told(f"{words}srun: error: node1: task 0: Exited with exit code 1\n")
    assert (cause.class_, cause.text) == ("arguments", "Could not override 'lrr'.")


def test_a_workers_own_traceback_is_read_behind_every_label_of_the_launcher(told):
    text = raised(2, "RuntimeError: Caught KeyError in DataLoader worker process 0.")
    text += raised(2, "KeyError: 'labels'").replace("Traceback", "Original Traceback")
    cause = told("".join(f"2: {line}\n" for line in text.splitlines()))
    assert (cause.class_, cause.rank, cause.text) == ("exception", 2, "2: [rank2]: KeyError: 'labels'")


@pytest.mark.parametrize(
    ("reason", "status", "state", "cause"),
    [
        ("TIMEOUT: TimeLimit", None, "failed", "walltime"),
        ("", -29, "failed", "walltime"),
        ("Job run at … and terminated by alice@pbs1", 271, "cancelled", "killed"),
        ("", 137, "failed", "host-memory"),
        ("", 139, "failed", "crash"),
        ("", 1, "failed", "unknown"),
        ("SIGTERM", None, "unfinished", "killed"),
        ("SIGTERM; checkpoint at step 9", 143, "unfinished", "killed"),
        ("its job was cancelled", None, "cancelled", "killed"),
        ("SIGUSR1", 85, "unfinished", "walltime"),
        ("deadline", 85, "unfinished", "walltime"),
        ("SIGTERM; rank 1 on node2: ValueError: a", 1, "failed", "unknown"),
        ("", 0, "finished", "none"),
        ("no rank gets on; rank 1 on node2 stands at train.py:7, in main: work()", 137, "failed", "hang"),
        ("rank 1 on node2: ValueError: a", 1, "failed", "unknown"),
        ("rank 1 on node2 ended with status 5", 5, "failed", "exit-status"),
    ],
)
def test_a_record_alone_says_what_it_can(reason, status, state, cause):
    assert judge_record(reason, status, state).class_ == cause


SUM = (
    "rt.save_best(value) got 0.487931 on rank 0 and 0.49678 on rank 1: each rank evaluates its own share of the data\n"
)
SUM_HINT = "hint: rt.save_best(rt.sum(correct) / samples), with the sums of all ranks\n"
OTHER = f"hpcddp: rank 1 on vm failed: RequestError: {SUM}{SUM_HINT}hint: the log of rank 1 has the whole story\n"
BATCH = "hpcddp: global batch: 200 = 2 ranks x 100 x 1; 2 ranks on 1 node (vm), launcher openmpi, gloo on cpu\n"
EPOCH = "epoch   0  train 1.0237  val 0.4879  acc 0.358\n"
RECORDED = "hpcddp: run runs/bert was recorded with other settings: global_batch: 32 -> 48\n"
ACCEPT = "hint: --accept global_batch takes the new; a run of its own: --fresh, or another name\n"
ACCELERATOR = (
    "[2026-11-26 11:24:59,890] [WARNING] [real_accelerator.py:213:get_accelerator] Setting accelerator to CPU.\n"
)
RANGE = "hpcddp: m_range.py:45: a second epoch began outside of rt.epochs(): a resumed run would not know the rest\n"
LOOP = "hint: for epoch in rt.epochs(10): for x, y in loader: …\n"
OF_RANK_0 = (
    f"hpcddp: rank 0 on vm failed: RequestError: {RANGE[23:]}{LOOP}hint: the log of rank 0 has the whole story\n"
)
SRUN = "srun: error: node2: task {}: Exited with exit code 2\n"


def prterun(rank: int, status: int) -> str:
    """Open MPI 5's words on the rank that ended first."""
    bar = 74 * "-" + "\n"
    first = "prterun detected that one or more processes exited with non-zero status,\n"
    first += "thus causing the job to be terminated. The first process to do so was:\n\n"
    return f"{bar}{first}   Process name: [prterun-vm-11000@1,{rank}]\n   Exit code:    {status}\n{bar}"


QUOTED = (
    f"hpcddp: rank 1 on vm ended with status 2. The end of its output:\n    hpcddp: m_sum.py:64: {SUM}    {SUM_HINT}"
)
QUOTED += "  all of it: /u/runs/m-sum/attempts/7.1/logs/rank-0001.vm.log\n"
JOB, RANK_1 = "job_0_log", "rank_0001_vm_log"


@pytest.mark.parametrize(
    ("logs", "rank", "line", "text"),
    [
        (
            {JOB: BATCH + EPOCH + OTHER + prterun(0, 6), RANK_1: f"hpcddp: m_sum.py:64: {SUM}{SUM_HINT}"},
            1,
            1,
            "m_sum.py",
        ),
        ({RANK_1: f"hpcddp: m_sum.py:64: {SUM}{SUM_HINT}"}, 1, 1, "m_sum.py:64"),
        ({JOB: BATCH + EPOCH + OTHER + prterun(0, 6)}, 1, 3, "rank 1 on vm failed: RequestError: rt.save_best"),
        ({JOB: BATCH + EPOCH + QUOTED + prterun(0, 6)}, 1, 4, "m_sum.py:64"),
        ({JOB: BATCH + EPOCH + RANGE + LOOP + prterun(0, 2), RANK_1: OF_RANK_0}, 0, 3, "m_range.py:45"),
        ({JOB: ACCELERATOR + RECORDED + ACCEPT + SRUN.format(0)}, 0, 2, "recorded with other settings"),
        (
            {JOB: ACCELERATOR + RECORDED + "  batch: 8 -> 12\n" + ACCEPT + SRUN.format(0)},
            0,
            2,
            "global_batch: 32 -> 48",
        ),
        ({JOB: ACCELERATOR + RECORDED + ACCEPT + SRUN.format(1), RANK_1: RECORDED + ACCEPT}, ALL, 1, "recorded with"),
        ({JOB: f"0: {EPOCH}1: {RECORDED}1: {ACCEPT}{SRUN.format(1)}"}, 1, 2, "recorded with other settings"),
    ],
)
def test_an_error_of_hpcddps_that_is_a_ranks_last_word_is_the_cause_and_its_hint_the_remedy(
    told, logs, rank, line, text
):
    for has_failed in (None, True):
        cause = told(**logs, has_failed=has_failed)
        assert (cause.class_, cause.rank, cause.line) == ("exit-status", rank, line)
        assert "hpcddp: " in cause.text
        assert text in cause.text
        hint = next(hint for hint in (SUM_HINT, ACCEPT, LOOP) if hint[6:].strip() == cause.remedy)
        assert any(hint in log for log in logs.values())


@pytest.mark.parametrize(
    ("log", "class_"),
    [
        (f"{RECORDED}{ACCEPT}{EPOCH}done\n", "none"),
        (f"hpcddp: warning: OMP_NUM_THREADS=8 is more than its 2 CPUs\n{ACCEPT}", "unknown"),
        (BATCH, "unknown"),
        ("hpcddp: run t: unfinished (a signal) after step 4, epoch 0\n  resume    the same command again\n", "unknown"),
        (f"{raised(1, 'KeyError: 5')}{RECORDED}{ACCEPT}", "exception"),
        (f"srun: error: node2: task 1: Segmentation fault\n{RECORDED}{ACCEPT}", "crash"),
        (f"{RECORDED}{ACCEPT}srun: error: node2: task 1: Killed\n", "exit-status"),
        (f"{RECORDED}{ACCEPT}srun: error: node2: task 1: Terminated\n", "exit-status"),
        (f"hpcddp: train.py:3: no checkpoint in /x: No such file or directory\n{ACCEPT}", "file-missing"),
    ],
)
def test_a_remark_of_hpcddps_is_no_error_and_a_cause_before_it_counts_more(told, log, class_):
    assert told(log).class_ == class_


def test_a_programs_own_last_words_behind_a_remark_with_a_hint_count_more(told):
    cause = told(f"{RECORDED}{ACCEPT}ERROR: unknown optimizer 'adanm'\n{SRUN.format(1)}")
    assert cause.text == "ERROR: unknown optimizer 'adanm'"


@pytest.mark.parametrize(
    ("line", "class_"),
    [
        ("hpcddp: stopped after step 495 (SIGTERM): unfinished, saved at step 495", "killed"),
        ("hpcddp: the script ends here: the run stopped (SIGTERM)", "killed"),
        ("hpcddp: no training begins: the job stopped (SIGTERM) in run runs/t", "killed"),
        ("hpcddp: the script ends here: the run stopped (SIGUSR1)", "walltime"),
        ("hpcddp: the script ends here: the run stopped (deadline)", "walltime"),
        ("hpcddp: stopped after step 495 (deadline): unfinished, saved at step 495", "walltime"),
        ("hpcddp: run t: unfinished (deadline) after step 354, epoch 29", "walltime"),
    ],
)
def test_a_run_that_was_stopped_says_by_what(told, line, class_):
    for has_failed in (None, True):
        cause = told(f"{EPOCH}{line}\n", has_failed=has_failed)
        assert (cause.class_, cause.rank, cause.text) == (class_, None, line)
        assert class_ != "killed" or cause.remedy.endswith("submit it again: a run resumes from its newest checkpoint")


SAME = "ValueError: batch 7 does not divide"
OF_RANKS = "".join(f"[rank {n}] INFO step\n" for n in range(3))
WORDS = "rank 1: the configuration differs, aborting\n"
ENDED = "srun: error: node{}: task {}: {}\n"
TORCHRUN = "E1126 x.py:1] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python\n"
KEYS = "torch.distributed.DistStoreError: wait timeout after 10000ms, keys: /default_pg/0//cpu//0/1"
CLIENTS = "torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients. 1/2 clients joined."
NO_PEER = "[E1126 16:46:16.9 socket.cpp:1028] [c10d] The client socket has timed out after 25000ms while trying to\n"
LOGGED = "2026-11-25 19:09:02,494 [rank 1] ERROR train: failed\n"
REQUEUED = CANCELLED.replace(" ***\n", " DUE TO JOB REQUEUE ***\n")
OVER = "slurmstepd-node1: error: Exceeded job memory limit\n"
OVER += "slurmstepd-node2: error: StepId=8.0 exceeded memory limit (9)\n"
LOAD = raised(0, "EOFError").replace("/u/train.py", "/lib/torch/serialization.py").replace("<module>", "load")
COPY = "cp: cannot stat '/scratch/cifar10.tar': No such file or directory\n"
MODULE = "/var/spool/job00005/slurm_script: line 18: module: command not found\n"


@pytest.mark.parametrize(
    ("log", "class_", "rank"),
    [
        # whose an error is: of all ranks, or of the first while others waited
        (raised(0, SAME) + raised(1, SAME), "exception", ALL),
        (raised(1, SAME) + raised(2, SAME) + raised(0, RESET), "exception", 1),
        (raised(None, "mpi4py.MPI.Exception: Message truncated\nMessage from rank 0 and tag 0"), "exception", None),
        (LOGGED + raised(None, "KeyError: 'label'") + raised(0, RESET), "exception", 1),
        (f"[rank 0] INFO step\n{REQUEUED}{ENDED.format(2, 1, 'Terminated')}{raised(0, 'KeyError: 5')}", "exception", 0),
        # a wait is no cause where the missing rank has raised something, and else that rank's
        (raised(0, LATE) + raised(1, "KeyError: 'label'"), "exception", 1),
        (OF_RANKS + raised(0, LATE) + raised(2, LATE), "hang", 1),
        (OF_RANKS + raised(0, LATE) + raised(2, LATE) + raised(1, LATE, line=99), "hang", None),
        (raised(None, KEYS) + TORCHRUN, "rendezvous", 1),
        (raised(None, "ModuleNotFoundError: No module named 'x'") + raised(None, CLIENTS), "import", 1),
        (NO_PEER + "".join(f"rank {n % 2}/2 step {n}\n" for n in range(8)) + ENDED.format(2, 1, "Terminated")
         + raised(0, RESET), "killed", 1),
        (raised(0, LATE) + "hpcddp: no rank gets on; rank 1 on node2 stands at train.py:7: the other ranks are ended\n"
         + ENDED.format(3, 2, "Killed"), "hang", 1),
        # a status, a signal, and words before them
        ("[rank 0] step 1\n" + ENDED.format(1, 1, "Exited with exit code 1"), "unknown", 1),
        (ENDED.format(1, 1, "Exited with exit code 3"), "exit-status", 1),
        (WORDS + ENDED.format(1, 1, "Exited with exit code 1"), "exit-status", 1),
        (WORDS + ENDED.format(1, 1, "Aborted (core dumped)"), "crash", 1),
        (ENDED.format(2, 1, "User defined signal 1"), "walltime", None),
        (WORDS + raised(0, RESET) + "terminate called without an active exception\n"
         + TORCHRUN.replace("1) local_rank: 0", "3) local_rank: 1")
         + "  rank      : 0 (local_rank: 0)\n  exitcode  : -6 (pid: 7)\n", "exit-status", 1),
        ("=   PID 6915 RUNNING AT node1\n=   EXIT CODE: 9\n[proxy:1@node2] x.c:490: failed\n", "host-memory", None),
        ("rank 1: no improvement for 3 epochs, stopping early\n" + raised(0, RESET), "early-exit", 1),
        ("torchrun: error: unrecognized arguments: --nproc-per-nodes\n" + ENDED.format(1, 0, "Exited with exit code 2"),
         "arguments", None),
        # the host's memory: of the only rank on that host
        (OVER + ENDED.format(1, 0, "Killed") + ENDED.format(2, 1, "Killed"), "host-memory", 1),
        (OVER + "srun: error: node1: tasks 0-1: Killed\nsrun: error: node2: tasks 2-3: Killed\n", "host-memory", None),
        # torch.load
        (LOAD, "checkpoint", 0),
        (LOAD.replace("EOFError", MISSING), "file-missing", 0),
        # a job script without ranks: what its output ends with
        (COPY, "file-missing", None),
        (f"{COPY}all done\n", "none", None),
        (MODULE, "command", None),
        (f"{MODULE}all done\n", "none", None),
    ],
)  # fmt: skip
def test_a_log_has_its_class_and_rank(told, log, class_, rank):
    cause = told(log)
    assert (cause.class_, cause.rank) == (class_, rank), cause
