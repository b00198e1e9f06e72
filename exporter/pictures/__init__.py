"""Drawings of a file's graph."""
