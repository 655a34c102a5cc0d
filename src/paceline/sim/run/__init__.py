"""The simulator: discrete events around the engine's own core."""
