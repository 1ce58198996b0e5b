"""The full config (``.json``): read with the place of every value, checked block by block, written as AMCT does."""
