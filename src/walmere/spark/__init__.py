"""Everything that runs on Spark. Spark schedules, distributes and retries; Arrow moves the rows."""
