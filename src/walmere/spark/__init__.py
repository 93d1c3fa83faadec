"""Everything that runs on Spark. Spark schedules, distributes, retries and checkpoints; Arrow moves the rows."""
