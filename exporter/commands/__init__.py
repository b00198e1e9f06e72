"""The commands of `pythonop`, a module each."""
