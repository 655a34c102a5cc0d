"""Pure policy: no torch, no clock, no process, no file, no hidden randomness."""
