"""Dialects."""
def to_dialect(model, schema): raise NotImplementedError
