"""The contract of a loaded module: docs/loaded-modules.md is made of these rows, and a test runs each beside the eager model."""
