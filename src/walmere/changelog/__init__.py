"""The change log: everything that was received, durable, in commit order, until every sink has applied it."""
