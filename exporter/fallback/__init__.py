"""Ways out of an export that failed: tried in the order in which they would work, and compared with eager before one is taken."""
