"""Parts of a captured network that learn, one after the other, to compute what they do in the float network."""
