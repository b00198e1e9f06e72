"""A call of Function.apply, while a model is exported, becomes an AutogradCall and one node."""
