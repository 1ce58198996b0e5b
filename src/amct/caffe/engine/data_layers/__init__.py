"""Layers that read data from files into a net, and one that writes a file."""
