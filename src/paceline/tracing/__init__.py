"""Records what drafters are worth along a target's own texts: the traces that `paceline.sim` replays."""
