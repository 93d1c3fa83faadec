"""What is done before Spark's Python workers start."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pyspark

from walmere.spark.daemon import without_archives


def test_archives_leave_the_path_only_if_the_same_pyspark_is_found_without_them(tmp_path: Path) -> None:
    package = Path(pyspark.__file__).parent
    site, archive = str(package.parent), str(package / "python" / "lib" / "pyspark.zip")
    assert without_archives([archive, "/spark/core.jar", site]) == [site]
    assert without_archives(["/spark/pyspark.zip", "/spark/core.jar", site]) == [site]
    assert without_archives([archive, "/nowhere"]) == [archive, "/nowhere"]
    other = tmp_path / "pyspark.zip"
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("pyspark/version.py", '__version__: str = "4.1.0"\n')
    assert without_archives([str(other), site]) == [str(other), site]
