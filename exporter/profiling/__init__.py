"""Where the time of a file goes."""
