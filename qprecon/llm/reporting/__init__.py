"""What a run tells: progress, seconds by phase, and the report."""
