"""`hpcddp VERB …`: finds the verb, runs it, prints its errors.

Only the module of the verb that was asked for is imported, so that `--help` and `env` cost a login node almost nothing.
"""

from __future__ import annotations

import os
import sys

from hpcddp.cli.streams import (
    forget_output,
    open_missing_streams,
    print_message,
    refuse_on_pipe,
    write_help,
    write_in_any_encoding,
)
from hpcddp.cli.verbs import VERBS, explain_os_error, format_verbs, unknown_verb
from hpcddp.errors import HpcddpError, RequestError


def _run(argv: list[str]) -> int:
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    if not argv or argv[0] in {"-h", "--help"}:
        write_help(format_verbs())
        return 0
    if argv[0] in {"-V", "--version"}:
        from hpcddp import __version__

        print(f"hpcddp {__version__}")
        return 0
    verb = argv[0]
    if verb not in VERBS:
        raise unknown_verb(argv)
    import importlib

    module = importlib.import_module(f"hpcddp.cli.{verb}")
    options, command = argv[1:], []
    if "--" in options:
        cut = options.index("--")
        options, command = options[:cut], options[cut + 1 :]
    if verb == "exec" and command and (status := module.run_plain(command, dict(os.environ), options)) is not None:
        return int(status)
    parser = module.build_parser()
    args = parser.read_words(options)
    if command and not parser.takes_command:
        raise RequestError(f"hpcddp {verb} takes no command after --, got {command[0]!r}", f"hpcddp {verb} --help")
    args.command = command
    return int(module.run(args, dict(os.environ)))


def _refuse_if_piped_as_job(argv: list[str]) -> None:
    """Print a refusal after a failed `render`, and after a first word that is no verb: it may have been `render`."""
    if argv and (argv[0] == "render" or argv[0] not in VERBS):
        refuse_on_pipe()


# Verbs that end at once. Collecting garbage takes a tenth of a render's time, and they leave none that matters.
_SHORT = {"render", "layout", "sites", "env", "exec", "supervise"}


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the process's exit status. Raises nothing but SystemExit from argparse's --help."""
    if argv is None:
        argv = sys.argv[1:]
        if argv[:1] and argv[0] in _SHORT:
            import gc

            gc.disable()
    has_output = open_missing_streams()
    write_in_any_encoding()
    try:
        if not has_output and argv[:1] not in (["exec"], ["launch"], ["train"], ["supervise"]):
            raise RequestError("standard output is closed, and the answer would go nowhere", "leave out `>&-`")
        status = _run(argv)
        sys.stdout.flush()
        return status
    except HpcddpError as error:
        _refuse_if_piped_as_job(argv)  # first: a message may fail, and an empty pipe is an empty job
        print_message(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _refuse_if_piped_as_job(argv)
        print_message("interrupted")
        return 130
    except BrokenPipeError:
        forget_output()  # `hpcddp layout | head`: the reader had enough
        return 141
    except OSError as error:
        _refuse_if_piped_as_job(argv)
        explained = explain_os_error(error)
        if explained is None:
            raise
        if error.filename is None:
            forget_output()
        print_message(str(explained))
        return explained.exit_code
    except UnicodeEncodeError as error:  # of a path: the streams take every character
        _refuse_if_piped_as_job(argv)
        what = f"{error.object!r} cannot be the name of a file here: Python's encoding is {error.encoding}"
        print_message(f"{what}\nhint: export PYTHONUTF8=1")
        return RequestError.exit_code
    except SystemExit:
        raise
    except BaseException:
        _refuse_if_piped_as_job(argv)
        raise  # a fault of hpcddp itself: the traceback is what its authors need


if __name__ == "__main__":
    sys.exit(main())
