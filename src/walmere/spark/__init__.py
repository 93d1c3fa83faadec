"""What runs on Spark. Spark schedules, spreads, retries and checkpoints; Arrow moves the rows."""
