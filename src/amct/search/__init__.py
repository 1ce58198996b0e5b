"""Which settings reach a goal: a ladder of choices per layer, their comparison on samples, and a certificate."""
