"""From fake-quantised models to files that run in integers."""
