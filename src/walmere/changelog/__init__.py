"""The change log: everything the publication sent, durable, in commit order, until every sink has applied it."""
