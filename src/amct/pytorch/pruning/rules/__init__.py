"""Rules of operations: where the channels of their inputs are found in their outputs."""
