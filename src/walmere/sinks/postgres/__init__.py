"""The PostgreSQL sink: another database as the target, as in CREATE SUBSCRIPTION."""
