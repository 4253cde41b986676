"""Code that several operators share, but not all: primitives with rules, and their arguments."""
