"""Work on a login node: a job is submitted, found again, watched and cancelled. `hpcddp.Job` is in here."""
