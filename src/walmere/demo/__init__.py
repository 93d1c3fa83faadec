"""What a newcomer sees first, and what tests and benchmarks stand on: a PostgreSQL server of one's own."""
