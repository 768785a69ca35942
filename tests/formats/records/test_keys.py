import pytest

from shardprep.formats.sources.listing import official_key, record_key


@pytest.mark.parametrize(
    ("class_name", "path", "key"),
    [
        ("n01440764", "n01440764/n01440764_10026.JPEG", "n01440764/n01440764_10026"),
        ("n01440764", "n01440764/sub/n01440764_7.jpg", "n01440764/n01440764_7"),
        ("n01440764", "n01440764/n01440764_7.jpeg", "n01440764/n01440764_7"),
        ("n01440764", "n01440764/ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000001"),
        ("ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000001"),
        ("test", "test/ILSVRC2012_test_00000002.JPEG", "ILSVRC2012_test_00000002"),
        ("n01440764", "n01440764/n02100735_7.JPEG", "n01440764/n02100735_7.JPEG"),
        ("cats", "cats/n01440764_7.JPEG", "cats/n01440764_7.JPEG"),
        ("cats", "cats/black/1.jpg", "cats/black/1.jpg"),
        ("n01440764", "n01440764/n01440764_7.png", "n01440764/n01440764_7.png"),
        ("n01440764", "n01440764/n01440764_٣.JPEG", "n01440764/n01440764_٣.JPEG"),
    ],
)
def test_an_official_name_gives_its_key_and_any_other_its_path(class_name: str, path: str, key: str) -> None:
    assert record_key(class_name, path) == key


def test_names_that_only_look_official_have_no_official_key() -> None:
    for stem in ("n0144076_1", "n01440764_", "ILSVRC2012_val_1", "ILSVRC2012_val_00000001 ", "n01440764_1\n"):
        assert official_key(stem) is None
