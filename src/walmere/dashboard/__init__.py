"""`walmere dashboard`: one live page about one or several subscriptions."""
