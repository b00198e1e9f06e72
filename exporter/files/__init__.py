"""The files themselves: read, written, looked into, and what they may name."""
