"""Runs the script argv[1] unchanged; where STOP_AT is set, the last rank gets a signal after that optimizer step."""

import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

at, name = os.environ.get("STOP_AT", "0 SIGTERM").split()
is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
steps = 0


def count(*_):
    global steps
    steps += 1
    if is_last and steps == int(at):
        signal.raise_signal(signal.Signals[name])


register_optimizer_step_post_hook(count)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
