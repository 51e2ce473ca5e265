"""Transported projection: the claim, its models, and the kernels that carry values to the end of a sequence."""
