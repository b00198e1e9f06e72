"""Files from strangers: whatever one says, the answer is a result or an error of ours. `python -m tests.fuzz --help`."""
