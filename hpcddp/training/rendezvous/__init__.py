"""The ranks find each other, form a process group, and part."""
