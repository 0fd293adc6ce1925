"""What each strategy needs for a run, and which one is the fastest: `plan=true` and `strategy=best`."""
