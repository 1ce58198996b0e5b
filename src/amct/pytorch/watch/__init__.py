"""Hooks on a copied model: they observe layer inputs and intermediate tensors while the user's loop runs it."""
