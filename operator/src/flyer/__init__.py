"""FlyerJobs: gang scheduling, time sharing and checkpoint-based preemption."""
