"""Which tables are mirrored, and how they look in the target: what the sections `[[table]]` and `[types]` say.

    table_choice whether a table is mirrored, and under which name
    rules        the sections, applied to a table: also with which columns
    columns      the columns of the target's table, each with the codec that makes it
    masks        codecs that hide values: hash, null, redact, a function
    keyed_hash   HMAC-SHA256 of a whole column
    functions    functions of the user
    clustering   sorts the rows of a copy

A mask is a codec, as a cast is. So COPY and the stream give the same values, and `verify` can make them again.
"""
