"""Paired noncommutative transport: the claim, its models, its figure, and the demonstration that is made of its rows."""
