"""State tracking: group words, formal languages and plain recall, with the layer as it comes."""
