"""What one node says, and how it is written: the call, its arguments and attributes, the file's metadata."""
