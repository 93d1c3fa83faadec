"""What a task does with the changes of a table: decode, fold, apply. No PySpark in here."""
