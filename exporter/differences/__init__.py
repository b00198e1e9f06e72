"""What differs between two files."""
