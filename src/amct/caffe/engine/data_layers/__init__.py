"""Layers that bring data into a net. Every module here is imported by the registry; none needs listing."""
