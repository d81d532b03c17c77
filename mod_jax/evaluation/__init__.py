"""What a trained model is worth: held-out losses under every selection, the causality gate, budgets, tables."""
