"""A page that trains a spiking network in the browser: ``python -m examples.web.build OUT``."""
