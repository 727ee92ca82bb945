"""A job script that somebody wrote, read as its scheduler and bash would read it, and the mistakes found in it.

Pure text in, findings out: `rules.py` is the way in and has the table of mistakes. docs/lint.md lists them.
"""
