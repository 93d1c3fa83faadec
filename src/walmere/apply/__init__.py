"""What a task does with the changes of a table: decode, fold, apply. Without PySpark."""
