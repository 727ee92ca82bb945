"""Files of a run for the attempts that follow, and how those resume."""
