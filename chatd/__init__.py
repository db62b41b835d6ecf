"""chatd: a daemon that serves multi-turn conversations with a language model to many tenants at once."""

__version__ = "0.1.0"
