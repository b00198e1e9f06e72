"""docs/versions.md: what works on which torch, exporter and Python."""
