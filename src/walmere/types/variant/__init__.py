"""json and jsonb as VARIANT.

codec      the codec: which documents are rejected
tokens     JSON text to a tree, as arrays
strings    escapes in strings
numbers    numbers of JSON, exact
encoding   the tree as the bytes of the specification
"""
