"""What both halves of a session agree on, and what carries it."""

__version__ = "0.1.0"
