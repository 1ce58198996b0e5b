"""Rounding of weights beyond the nearest: so that errors cancel, and so that sums of neighbours fit 16 bits."""
