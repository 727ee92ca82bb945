"""Schedulers: one module each holds what is its own, as one row of data and pure text functions.

`row.py` says what a row may hold, `registry.py` finds the rows, and `run.py` is the only module that starts a program.
"""
