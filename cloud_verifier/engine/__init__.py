"""Target models behind one port, and what they need: slots, verification, preparation."""
