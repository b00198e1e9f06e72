"""What `test_values_read` reads of another module of the package."""

FACTOR = 0.25
