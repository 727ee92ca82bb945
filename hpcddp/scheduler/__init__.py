"""Talking to a live scheduler: what to type and what the answers mean is pure text; `run.py` alone runs programs."""
