"""How the layer starts: which parts of its start help it learn, on four small probes."""
