"""FlyerJobs: the event queue, status commits, quarantine and events."""
