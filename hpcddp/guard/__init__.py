"""Code that Python runs at its start in every rank of `hpcddp exec`: it finds ranks that train alone.

The folder is put on PYTHONPATH, and at the front of the path by `hpcddp_guard.pth`, which is installed beside hpcddp:
that is read where Python ignores PYTHONPATH (`-I`, `-E`) or has another one. Standard library only, and nothing of
hpcddp: the rank's Python may be another one.
"""

#: The variable with the names of those of which an agent gives each rank one: without any of them, this is the agent.
RANK_MARKS = "HPCDDP_RANK_MARKS"
#: The variable with the number of ranks that the agents of all nodes are to start.
AGENT_RANKS = "HPCDDP_AGENT_RANKS"
#: The variable with the name of the agent that serves a store to its ranks, and the names of its variables: its run,
#: and the number of agents.
AGENT_NAMES = "HPCDDP_AGENT_NAMES"
