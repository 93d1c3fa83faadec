"""Object stores: S3, GCS, Azure, or a directory as one. Objects are created once, or replaced by compare-and-set.

    store = open_store("s3://bucket/lake", {"region": "eu-central-1"})
    store.create("a", b"…")              put if absent: of several writers, one gets True
    store.replace_if("a", b"…", etag)    put if it still has this e-tag: a compare-and-set

`base` has the contract. The parts:

    options      URLs and options; secrets are refused there
    remote       S3, GCS and Azure, by `obstore`
    aws_profile  credentials in ~/.aws
    translate    its errors as ours
    directory    a directory on a disk or a mount: `file://`
"""

from walmere.object_store.base import ObjectStore, StoredObject
from walmere.object_store.opening import is_url, open_store

__all__ = ["ObjectStore", "StoredObject", "is_url", "open_store"]
