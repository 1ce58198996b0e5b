"""The layer types, a file for each or for a small family. Every module here is imported by the registry; none needs listing."""
