"""What a run tells of itself: the numbers of a step, how long calls should take, profiles.  Called by: train, Run."""
