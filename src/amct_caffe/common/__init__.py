"""AMCT's package of what its functions share."""
