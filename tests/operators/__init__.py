"""Torch's own operator database on both exporters, compared with eager.

`samples` says which operators there are and with which inputs each is called, `named` adds inputs at which an exporter was
once wrong, `numbers` says how far two results may differ, `outcome` runs one of them and finds its word, `sweep` runs them in
processes that may die, `table` writes docs/operators.md, `known` lists what is still wrong.
"""
