"""Paired noncommutative transport: the experiment, its models, its figures, and the demonstration."""
