"""Training of draft heads: answers of the target, its features, and a head that learns to run ahead of it."""
