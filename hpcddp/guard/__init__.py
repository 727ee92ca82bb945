"""What Python runs at its start in every rank that `hpcddp exec` starts: ranks that train alone are found.

The folder is put on PYTHONPATH. Standard library only, and nothing of hpcddp: the rank's Python may be another one.
"""

#: The variable with the names of those of which an agent gives each rank one: without any of them, this is the agent.
RANK_MARKS = "HPCDDP_RANK_MARKS"
