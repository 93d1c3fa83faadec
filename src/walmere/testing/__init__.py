"""PostgreSQL servers for tests and for the demo."""
