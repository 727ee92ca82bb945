"""What Python runs at its start in every rank that `hpcddp exec` starts: ranks that train alone are found.

The folder is put on PYTHONPATH. Standard library only, and nothing of hpcddp: the rank's Python may be another one.
"""

import os
import sys

#: The variable with the names of those of which an agent gives each rank one: without any of them, this is the agent.
RANK_MARKS = "HPCDDP_RANK_MARKS"
#: The variable with the number of ranks that the agents of all nodes are to start.
AGENT_RANKS = "HPCDDP_AGENT_RANKS"
#: The variable with the name of the agent that serves a store to its ranks, and the names of its variables: its run,
#: the number of agents, whether its store is used, how often it has started its ranks again.
AGENT_NAMES = "HPCDDP_AGENT_NAMES"


def start_with_torch() -> None:
    """What torch calls at the end of its import where hpcddp is installed (pyproject.toml): for ranks whose Python does
    not see this folder, since it ignores PYTHONPATH (`-I`, `-E`) or has another one."""
    if AGENT_NAMES not in os.environ:
        return
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, folder)
    try:
        import hpcddp_guard  # type: ignore[import-not-found]  # this folder is on the path

        hpcddp_guard.start_with_torch()
    except Exception:  # noqa: S110  # torch would end the program
        pass
    finally:
        sys.path.remove(folder)
