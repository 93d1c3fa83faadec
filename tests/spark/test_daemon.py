"""What is done before Spark's Python workers start."""

from __future__ import annotations

from pathlib import Path

import pyspark

from walmere.spark.daemon import without_archives


def test_archives_leave_the_path_only_if_pyspark_is_found_without_them() -> None:
    site = str(Path(pyspark.__file__).parents[1])
    assert without_archives(["/spark/pyspark.zip", "/spark/core.jar", site]) == [site]
    assert without_archives(["/spark/pyspark.zip", "/nowhere"]) == ["/spark/pyspark.zip", "/nowhere"]
