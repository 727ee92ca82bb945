"""`hpcddp VERB …`: finds the verb, runs it, prints its errors.

Only the module of the verb that was asked for is imported, so that `--help` and `env` cost a login node almost nothing.
"""

from __future__ import annotations

import errno
import os
import sys

from hpcddp.errors import HpcddpError, RequestError, nearest

# verb -> what it does. The module is hpcddp.cli.<verb>.
VERBS = {
    "render": "print the job script for a request (pipe it to qsub, sbatch or bash)",
    "layout": "show where each rank will be, before anything is queued",
    "lint": "find known mistakes in a job script that is there already",
    "sites": "list the known sites, or show one",
    "env": "say which rank this process is, and how that is known",
    "exec": "become a command inside a rank, with torch's variables set",
    "launch": "run a command on every rank of the allocation this shell is in",
    "state": "say how far a run is: finished, failed, or to be continued",
    "train": "the reference trainer: DDP on images",
    "compare": "say whether two runs are the same to the last bit, and what differed",
}


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {text}" for verb, text in VERBS.items())
    return (
        "usage: hpcddp VERB [options] [-- command ...]\n\n"
        "From a PyTorch training script to a correct multi-node run on PBS and Slurm clusters.\n\n"
        f"{verbs}\n\n"
        "  hpcddp VERB --help        the options of one verb\n"
        "  hpcddp --version\n\n"
        "example: hpcddp render --site abci3 --account GROUP --nodes 4 -- python train.py | qsub\n"
    )


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in {"-h", "--help", "help"}:
        sys.stdout.write(_help())
        return 0
    if argv[0] == "--version":
        from hpcddp import __version__

        print(f"hpcddp {__version__}")
        return 0
    verb = argv[0]
    if verb not in VERBS:
        raise RequestError(f"{verb!r} is not a verb of hpcddp{nearest(verb, list(VERBS))}", "hpcddp --help")
    import importlib

    module = importlib.import_module(f"hpcddp.cli.{verb}")
    options, command = argv[1:], []
    if "--" in options:
        cut = options.index("--")
        options, command = options[:cut], options[cut + 1 :]
    args = module.build_parser().parse_args(options)
    args.command = command
    return int(module.run(args, dict(os.environ)))


def _refuse_if_render(argv: list[str]) -> None:
    """After a failed `render` on a pipe, leave text there that no scheduler takes for a job."""
    if argv[:1] == ["render"] and not (sys.stdout.closed or sys.stdout.isatty()):
        from hpcddp.cli.refusal import REFUSAL

        try:
            sys.stdout.write(REFUSAL)
            sys.stdout.flush()
        except OSError:  # the reader has gone: nothing can be queued from this pipe
            _forget_output()


def _forget_output() -> None:
    """Python flushes what is left at its exit, and would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _tell(text: str) -> None:
    try:
        sys.stderr.write(f"hpcddp: {text}\n")
        sys.stderr.flush()
    except OSError:  # nobody listens; the exit status says it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _open_missing_streams() -> bool:
    """Whether standard output is there. What was closed (`>&-`, `2>&-`) is opened on nothing, so that no file that is
    opened later gets its number, and an error can be told without ado."""
    has_output = sys.stdout is not None
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            os.set_inheritable(number, True)  # a program that is started next has it as well
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # for the whole process
    return has_output


# What a write to a standard stream says of the place that the user chose, and not of hpcddp.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the process's exit status. Raises nothing but SystemExit from argparse's --help."""
    argv = sys.argv[1:] if argv is None else argv
    has_output = _open_missing_streams()
    if argv[:1] == ["render"]:
        import signal

        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a killed render must leave its refusal, too
    try:
        if not has_output and argv[:1] not in (["exec"], ["launch"], ["train"]):
            raise RequestError("standard output is closed, and the answer would go nowhere", "leave out `>&-`")
        status = _run(argv)
        sys.stdout.flush()
        return status
    except HpcddpError as error:
        _refuse_if_render(argv)  # first: telling may fail, and an empty pipe is an empty job
        _tell(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _refuse_if_render(argv)
        _tell("interrupted")
        return 130
    except BrokenPipeError:
        _forget_output()  # `hpcddp layout | head`: the reader had enough
        return 141
    except OSError as error:
        _refuse_if_render(argv)
        if error.errno not in _NO_ROOM:
            raise
        _forget_output()
        _tell(f"the output cannot be written: {(error.strerror or '').lower()}\nhint: df -h .")
        return RequestError.exit_code
    except SystemExit:
        raise
    except BaseException:
        _refuse_if_render(argv)
        raise  # a fault of hpcddp itself: the traceback is what its authors need


if __name__ == "__main__":
    sys.exit(main())
