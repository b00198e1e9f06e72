"""Several PythonOps that run as one: which may (link), and how (chain)."""
