"""The tests; a package, so that another `tests` on the path of an environment cannot take its name."""
