"""What passes take on this machine: measured through the engine's own executor, fitted, judged."""
