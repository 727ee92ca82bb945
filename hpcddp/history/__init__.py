"""Run folders, read back: plain files in, values out. Standard library only."""
