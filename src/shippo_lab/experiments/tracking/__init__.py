"""State tracking: group words, formal languages and plain recall, with the default layer."""
