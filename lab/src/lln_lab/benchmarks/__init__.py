"""Programs that time one thing against another, in turns, for the published results."""
