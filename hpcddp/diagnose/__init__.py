"""Why a job ended: the first cause, from its logs and the scheduler's record."""
