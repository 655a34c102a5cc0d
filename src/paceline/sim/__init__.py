"""The laboratory without a model: recorded acceptance, costs, simulation and bounds. Never reaches torch."""
