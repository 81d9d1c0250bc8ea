"""The public operators: each validates its arguments, chooses an implementation and calls it."""
