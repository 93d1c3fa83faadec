"""The subscriber: what PostgreSQL's launcher, walreceiver, table sync workers and apply worker do."""
