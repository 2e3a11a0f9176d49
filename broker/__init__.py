"""What both halves of a session agree on, and what carries it: messages, noise, topics, transports."""

__version__ = "0.1.0"
