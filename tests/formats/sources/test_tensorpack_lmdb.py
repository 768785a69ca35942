"""LMDBs of tensorpack's LMDBSerializer: what was put in comes out, and a hostile file is only an error."""

import base64
import os
import pickle
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from shardprep.formats import ConvertOptions, PlanOptions, convert, open_dataset, verify
from shardprep.formats.errors import SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.sources import tensorpack as datapoint
from shardprep.formats.sources.listing import MAX_CLASSES
from shardprep.formats.sources.pickled import ByteRange, read_bytes
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.record_files import ByteWindow
from shardprep.formats.sources.tensorpack import read_datapoint, read_item
from shardprep.loaders import Flow
from support.datasets import converted
from support.image_files import JPEG, encoded, pixels
from support.memory import memory_below
from support.saved_items import are_same
from support.tensorpack_files import NEWEST, SERIALIZERS, key_of, packed, pickled, save, save_datapoints

IMAGES = [encoded(pixels(3 + n, 30 - n, 3)) for n in range(20)] + [encoded(pixels(9, 9, 3), ".png")]
LABELS = [(7 * n) % 10 for n in range(len(IMAGES))]

IN_A_DATAPOINT: dict[str, Callable[[bytes, int], list[Any]]] = {
    "bytes": lambda image, label: [image, label],
    "array": lambda image, label: [np.frombuffer(bytearray(image), np.uint8), label],
    "read-only array and numpy integer": lambda image, label: [np.frombuffer(image, "u1"), np.int64(label)],
    "strided array and another integer": lambda image, label: [
        np.repeat(np.frombuffer(image, "u1"), 2)[::2],
        np.array(label, ">u2")[()],
    ],
}


def save_images(path: Path, first: int = 0) -> Path:
    return save_datapoints(path, map(IN_A_DATAPOINT["array"], IMAGES, LABELS), first=first)


def records_of(dataset: Path) -> dict[str, tuple[int, bytes]]:
    with open_dataset(dataset) as opened:
        return {record.key: (record.label, bytes(record.image)) for record in opened}


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAD0lEQVQIHWNkZmI8fvw4AATYAl3EDQXUAAAAAElFTkSuQmCC"
)
WRITTEN_ELSEWHERE = {  # [np.asarray(bytearray(PNG), "u1"), np.int64(7)] by what their names say
    "Python 2.7, cPickle, numpy 1.16": "gAJdcQEoY251bXB5LmNvcmUubXVsdGlhcnJheQpfcmVjb25zdHJ1Y3QKcQJjbnVtcHkKbmRhcnJheQpxA0sAhVUBYodScQQoSwFLSIVjbnVtcHkKZHR5cGUKcQVVAnUxSwBLAYdScQYoSwNVAXxOTk5K/////0r/////SwB0YolVSIlQTkcNChoKAAAADUlIRFIAAAACAAAAAQgCAAAAe0Do3QAAAA9JREFUCB1jZGZiPH78OAAE2AJdxA0F1AAAAABJRU5ErkJggnRiY251bXB5LmNvcmUubXVsdGlhcnJheQpzY2FsYXIKcQdoBVUCaThLAEsBh1JxCChLA1UBPE5OTkr/////Sv////9LAHRiVQgHAAAAAAAAAIZScQllLg==",
    "Python 2.7, pickle, numpy 1.16": "gAJdcQAoY251bXB5LmNvcmUubXVsdGlhcnJheQpfcmVjb25zdHJ1Y3QKcQFjbnVtcHkKbmRhcnJheQpxAksAhXEDVQFicQSHcQVScQYoSwFLSIVxB2NudW1weQpkdHlwZQpxCFUCdTFxCUsASwGHcQpScQsoSwNVAXxxDE5OTkr/////Sv////9LAHRxDWKJVUiJUE5HDQoaCgAAAA1JSERSAAAAAgAAAAEIAgAAAHtA6N0AAAAPSURBVAgdY2RmYjx+/DgABNgCXcQNBdQAAAAASUVORK5CYIJxDnRxD2JjbnVtcHkuY29yZS5tdWx0aWFycmF5CnNjYWxhcgpxEGgIVQJpOHERSwBLAYdxElJxEyhLA1UBPHEUTk5OSv////9K/////0sAdHEVYlUIBwAAAAAAAABxFoZxF1JxGGUu",
    "Python 3.6, numpy 1.15": "gASVGgEAAAAAAABdlCiMFW51bXB5LmNvcmUubXVsdGlhcnJheZSMDF9yZWNvbnN0cnVjdJSTlIwFbnVtcHmUjAduZGFycmF5lJOUSwCFlEMBYpSHlFKUKEsBS0iFlGgEjAVkdHlwZZSTlIwCdTGUSwBLAYeUUpQoSwOMAXyUTk5OSv////9K/////0sAdJRiiUNIiVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAD0lEQVQIHWNkZmI8fvw4AATYAl3EDQXUAAAAAElFTkSuQmCClHSUYmgBjAZzY2FsYXKUk5RoDYwCaTiUSwBLAYeUUpQoSwOMATyUTk5OSv////9K/////0sAdJRiQwgHAAAAAAAAAJSGlFKUZS4=",
    "Python 3.8, numpy 1.24": "gAWVFwEAAAAAAABdlCiMEm51bXB5LmNvcmUubnVtZXJpY5SMC19mcm9tYnVmZmVylJOUKJZIAAAAAAAAAIlQTkcNChoKAAAADUlIRFIAAAACAAAAAQgCAAAAe0Do3QAAAA9JREFUCB1jZGZiPH78OAAE2AJdxA0F1AAAAABJRU5ErkJggpSMBW51bXB5lIwFZHR5cGWUk5SMAnUxlImIh5RSlChLA4wBfJROTk5K/////0r/////SwB0lGJLSIWUjAFDlHSUUpSMFW51bXB5LmNvcmUubXVsdGlhcnJheZSMBnNjYWxhcpSTlGgHjAJpOJSJiIeUUpQoSwOMATyUTk5OSv////9K/////0sAdJRiQwgHAAAAAAAAAJSGlFKUZS4=",
    "Python 3.11, numpy 2.4": "gAWVGQEAAAAAAABdlCiME251bXB5Ll9jb3JlLm51bWVyaWOUjAtfZnJvbWJ1ZmZlcpSTlCiWSAAAAAAAAACJUE5HDQoaCgAAAA1JSERSAAAAAgAAAAEIAgAAAHtA6N0AAAAPSURBVAgdY2RmYjx+/DgABNgCXcQNBdQAAAAASUVORK5CYIKUjAVudW1weZSMBWR0eXBllJOUjAJ1MZSJiIeUUpQoSwOMAXyUTk5OSv////9K/////0sAdJRiS0iFlIwBQ5R0lFKUjBZudW1weS5fY29yZS5tdWx0aWFycmF5lIwGc2NhbGFylJOUaAeMAmk4lImIh5RSlChLA4wBPJROTk5K/////0r/////SwB0lGJDCAcAAAAAAAAAlIaUUpRlLg==",
    "msgpack 0.6, Python 2.7": "koXEBHR5cGXEA3x1McQEa2luZMQAxAJuZMPEBXNoYXBlkUjEBGRhdGHESIlQTkcNChoKAAAADUlIRFIAAAACAAAAAQgCAAAAe0Do3QAAAA9JREFUCB1jZGZiPH78OAAE2AJdxA0F1AAAAABJRU5ErkJgggc=",
    "msgpack 1.2, msgpack-numpy 0.4.8": "koXEAm5kw8QEdHlwZaN8dTHEBGtpbmTEAMQFc2hhcGWRSMQEZGF0YcRIiVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAAD0lEQVQIHWNkZmI8fvw4AATYAl3EDQXUAAAAAElFTkSuQmCCg8QCbmTCxAR0eXBlozxpOMQEZGF0YcQIBwAAAAAAAAA=",
}


def datapoint_of(data: bytes) -> tuple[ByteRange, int]:
    return read_datapoint(ByteWindow.of(data))


@pytest.mark.parametrize("order", ["key", "shuffled"])
def test_keys_of_more_than_eight_digits_are_in_the_order_of_their_numbers(order: str, tmp_path: Path) -> None:
    first = 10**8 - len(IMAGES) // 2
    path = save_images(tmp_path / "file", first=first)
    few = save_images(tmp_path / "few")

    converted(path, tmp_path / "out", order=order)
    converted(few, tmp_path / "as it would be", order=order)

    found = records_of(tmp_path / "out")
    assert list(found.values()) == list(records_of(tmp_path / "as it would be").values())
    assert sorted(found) == [f"{first + n:09d}" for n in range(len(IMAGES))]


def allowing_partial(path: Path, output: Path) -> Any:
    options = ConvertOptions(allow_partial=True)
    return convert(path, output, split="train", workers=0, options=options)[0].manifest


def test_records_that_were_lost_when_the_map_grew_are_missed_and_a_list_that_was_never_written(
    tmp_path: Path,
) -> None:
    """The same happens with tensorpack itself if its map is small."""
    records = {key_of(n): NEWEST([image, 0]) for n, image in enumerate(IMAGES)}
    path = save(tmp_path / "file", records, NEWEST(list(records)), map_size=32_768)
    listing = recognise(path).listing("train")
    there, lost = len(listing.entries), len(IMAGES) - len(listing.entries)
    assert lost > 5

    with pytest.raises(
        SourceIncomplete, match=rf"has {there} images, not 21 .*lists {lost} that were lost, 0000"
    ):
        converted(path, tmp_path / "out")
    manifest = allowing_partial(path, tmp_path / "out")

    assert (manifest.records, manifest.partial) == (there, True)

    path = save(tmp_path / "unfinished", {key_of(n): NEWEST([JPEG, n]) for n in range(3)}, None)
    with pytest.raises(SourceIncomplete, match=r"__keys__.* is missing.*--allow-partial"):
        converted(path, tmp_path / "other")
    manifest = allowing_partial(path, tmp_path / "other")
    assert (manifest.records, manifest.partial) == (3, True)


RECORD = NEWEST([JPEG, 1])
LISTS: dict[str, tuple[bytes, str]] = {
    "one too few": (NEWEST([key_of(0)]), "__keys__ lists a record twice, or does not list one"),
    "another one": (NEWEST([key_of(0), key_of(2)]), "or does not list one"),
    "one twice": (NEWEST([key_of(0), key_of(1), key_of(0)]), "lists a record twice"),
    "longer zeros": (NEWEST([b"000000000", b"000000001"]), "__keys__: its key is not a number"),
}


@pytest.mark.parametrize(("keys", "message"), LISTS.values(), ids=LISTS)
def test_a_list_of_keys_that_is_not_that_of_the_records_is_refused(
    keys: bytes, message: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "file", {key_of(0): RECORD, key_of(1): RECORD}, keys)

    with pytest.raises(SourceDamaged, match=re.escape(message)):
        allowing_partial(path, tmp_path / "out")


def test_each_record_and_the_list_may_be_serialized_in_another_way(tmp_path: Path) -> None:
    records, keys = {key_of(0): RECORD, key_of(1): packed([JPEG, 2])}, packed([key_of(0), key_of(1)])
    path = save(tmp_path / "file", records, keys)

    assert recognise(path).listing("train").entries["label"].tolist() == [1, 2]
    save(tmp_path / "other", {key_of(0): RECORD, key_of(1): pickle.dumps([JPEG, 2], 2)}, None)
    with pytest.raises(SourceDamaged, match="some images are stored as bytes and some as text"):
        recognise(tmp_path / "other").listing("train")


PIXELS = pixels(4, 5, 3)
NO_DATAPOINTS: dict[str, Any] = {
    "decoded": [PIXELS, 1],
    "floats": [PIXELS.ravel() / 255, 1],
    "a path": ["cat.jpg", 1],
    "swapped": [1, JPEG],
    "text as label": [JPEG, "cat"],
    "a float as label": [JPEG, 1.0],
    "a truth": [JPEG, True],
    "one hot": [JPEG, np.eye(3, dtype="i8")[1]],
    "none": [JPEG, None],
    "negative": [JPEG, -1],
    "large": [JPEG, MAX_CLASSES],
    "alone": [JPEG],
    "boxes beside": [JPEG, 1, [1.0, 2.0]],
    "a dict": {"image": JPEG, "label": 1},
    "text of numpy": [np.array(["cat"]), 1],
    "complex": [JPEG, np.complex64(1)],
}


@pytest.mark.parametrize("serializer", ["pickle 2", "pickle 4", "pickle 5", "msgpack"])
@pytest.mark.parametrize("point", NO_DATAPOINTS.values(), ids=NO_DATAPOINTS)
def test_what_is_no_encoded_image_with_its_label_is_refused(point: Any, serializer: str) -> None:
    with pytest.raises(ValueError, match=r"it is not \[image, label\]|plain numbers"):
        datapoint_of(SERIALIZERS[serializer](point))


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_a_value_that_is_cut_off_anywhere_is_refused(serializer: str) -> None:
    data = SERIALIZERS[serializer]([np.frombuffer(JPEG, "u1"), np.int64(1)])

    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"\w"):
            datapoint_of(data[:end])


def test_a_pickle_within_msgpack_what_is_too_large_for_an_image_and_pyarrow_are_refused() -> None:
    objects = {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": pickle.dumps([1])}
    large = ByteWindow(lambda length, offset: NEWEST([JPEG, 1])[:length], 0, 1 << 30)

    with pytest.raises(ValueError, match="an array of more than plain numbers"):
        datapoint_of(packed([objects, 1]))
    with pytest.raises(ValueError, match="too many for an image"):
        read_datapoint(large)
    with pytest.raises(ValueError, match=r"pyarrow.*TENSORPACK_SERIALIZE=pickle"):
        datapoint_of(bytes.fromhex("0000000001000000 0000000000000000 5c010000") + bytes(100))


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def short(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def word(name: str) -> bytes:
    """GLOBAL: a name of a module, then one in it."""
    return "c{}\n{}\n".format(*name.rsplit(".", 1)).encode()


SIZE = struct.Struct("<Q")
ARGUMENT = text("touch was-run")
DTYPE, CORE = word("numpy.dtype"), "numpy.core.multiarray."
NO_FIELDS = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
UINT8 = DTYPE + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|") + NO_FIELDS
BLANK = word(CORE + "_reconstruct") + word("numpy.ndarray") + b"K\x00\x85C\x01b\x87R"
BUFFER, DATA = word("numpy.core.numeric._frombuffer"), b"C\x03abc"


def filled(shape: bytes, dtype: bytes = UINT8, data: bytes = DATA) -> bytes:
    """An array of one dimension as numpy 1 rebuilds it."""
    return BLANK + b"(K\x01" + shape + b"\x85" + dtype + b"\x89" + data + b"tb"


NAMED: dict[str, tuple[bytes, str]] = {
    "GLOBAL": (word("os.system") + ARGUMENT + b"\x85R", "os.system"),
    "STACK_GLOBAL": (short("os") + short("system") + b"\x93" + ARGUMENT + b"\x85R", "os.system"),
    "OBJ": (b"(" + word("os.system") + ARGUMENT + b"o", "os.system"),
    "numpy's own loader": (word("numpy.load"), "numpy.load"),
    "getattr": (word("__builtin__.getattr"), "__builtin__.getattr"),
    "a name that is no text": (b"c\xff\nsystem\n", r"\xff.system"),
}
HARMFUL: dict[str, bytes] = {
    **{name: body for name, (body, _) in NAMED.items()},
    "STACK_GLOBAL of numbers": b"K\x01K\x02\x93",
    "INST": b"(" + ARGUMENT + b"ios\nsystem\n",
    "INST of an admitted name": b"(" + text("u1") + b"inumpy\ndtype\n",
    "OBJ of an admitted name": b"(" + DTYPE + text("u1") + b"o",
    "NEWOBJ of an admitted name": DTYPE + b")\x81",
    "NEWOBJ_EX of an admitted name": DTYPE + b"))\x92",
    "a name without an end": b"c" + b"o" * 300 + b"\nsystem\n",
    "EXT1": b"\x82\x01",
    "EXT4": b"\x84\x01\x01\x01\x01",
    "PERSID": b"Pos.system\n",
    "BINPERSID": b"K\x01Q",
    "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": b"\x98",
    "an attribute": UINT8 + b"}" + text("a") + b"K\x01sb",
    "a set": b"\x8f",
    "BUILD of a word": DTYPE + b"(K\x03NNNK\x00tb",
    "BUILD on a dtype": UINT8 + text("state") + b"b",
    "BUILD with a class below": UINT8.replace(b"NNNJ", b")NNJ"),
    "BUILD with fields": UINT8.replace(b"NNNJ", b"NN)J"),
    "another byte order": UINT8.replace(text("|"), text("x")),
    "objects in a list": filled(b"K\x01", UINT8.replace(b"u1", b"O8"), b"]"),
    "objects of bytes": filled(b"K\x03", UINT8.replace(b"u1", b"O1")),
    "a negative shape": filled(b"J\xfd\xff\xff\xff"),
    "a shape of text": filled(text("a")),
    "a shape of truths": filled(b"\x88", data=b"C\x01a"),
    "bytes too many": filled(b"K\x02"),
    "a call of the array's class": word("numpy.ndarray") + b"K\x03\x85\x85R",
    "a scalar of no dtype": word(CORE + "scalar") + text("O") + DATA + b"\x86R",
    "a scalar without bytes": word(CORE + "scalar") + UINT8 + b"\x85R",
    "a buffer of text": BUFFER + b"(" + ARGUMENT + UINT8 + b")NtR",
    "axes that are not there": BUFFER + b"(" + DATA + UINT8 + b"K\x03\x85U\x01KK\x05\x85tR",
    "a dtype of a list": DTYPE + b"]K\x00K\x01\x87R",
    "a dtype of nothing": DTYPE + b")R",
    "another encoding": word("_codecs.encode") + ARGUMENT + text("zip") + b"\x86R",
    "encoded bytes": word("_codecs.encode") + DATA + text("latin1") + b"\x86R",
    "encoded text": word("_codecs.encode") + text("€") + text("latin1") + b"\x86R",
    "bytes of a size": word("__builtin__.bytes") + b"J\xff\xff\xff\x7f\x85R",
    "a call of a list": b"]K\x01\x85R",
    "a call with a list": DTYPE + b"]R",
    "a memo of 2**32 places": b"K\x01r\xff\xff\xff\xff",
    "what was never put": b"j\xff\xff\xff\xff",
    "2**63 bytes": b"\x96" + SIZE.pack(1 << 63),
    "an integer of 255 bytes": b"\x8a\xff" + bytes(255),
    "a million lists": b"]" * 1_000_000,
    "lists in lists": b"](" * 80 + b"]" + b"e" * 80,
    "itself in a list": b"]q\x00h\x00a",
    "itself in a pair": b"]q\x00(h\x00h\x00e",
    "itself in a dict": b"}\x94(U\x01ah\x00u",
    "lists of the same lists": b"]\x94" + b"".join(b"](" + b"h%c" % n * 9 + b"e\x94" for n in range(7)),
    "the same bytes many times": b"(B\x00\x00\x01\x00" + bytes(1 << 16) + b"\x94" + b"h\x00" * 900 + b"l",
    "a mark that is missing": b"e",
    "a mark in a list": b"](" + b"a",
    "an empty stack": b"R",
    "appending to a number": b"K\x01K\x01a",
    "setting in a list": b"]K\x01K\x01s",
    "an unknown opcode": b"\xfe",
    "what protocol 0 had": b"I1\n",
    "two results": b"K\x01K\x01",
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_pickle_of_more_than_plain_data_is_refused_by_name_and_nothing_is_run(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = re.escape(f"asks for {NAMED[case][1]!r}, which was not run") if case in NAMED else "it |its |codec"
    with memory_below(4 << 20), pytest.raises(ValueError, match=told):
        datapoint_of(b"\x80\x04" + HARMFUL[case] + b".")
    assert not list(tmp_path.iterdir())


def test_a_long_text_is_decoded_once_however_often_a_pickle_turns_it_into_bytes() -> None:
    long = text("a" * (4 << 20)) + b"q\1" + text("latin1") + b"\x86q\2"
    data = b"\x80\x04" + word("_codecs.encode") + b"q\0" + long

    def seconds(times: int) -> float:
        began = time.process_time()
        with pytest.raises(ValueError, match="ends before it is complete"):
            datapoint_of(data + b"h\0h\2R" * times + b".")
        return time.process_time() - began

    assert seconds(1200) < 20 * seconds(6)


class RunsACommand:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was-run",)


@pytest.mark.parametrize("where", ["image", "label", "datapoint"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_file_that_would_run_a_command_is_an_error_that_names_it(
    protocol: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    harm, dumps = RunsACommand(), pickled(protocol)
    point: Any = {"image": [harm, 1], "label": [JPEG, harm], "datapoint": harm}.get(where, [JPEG, 1])
    path = save_datapoints(tmp_path / "file", [point], dumps)

    with pytest.raises(SourceDamaged, match=r"asks for '(posix|os)\.system', which was not run"):
        converted(path, tmp_path / "out")
    assert not (tmp_path / "was-run").exists()


MSGPACK_BOMBS: dict[str, bytes] = {
    "2**32 - 1 items": b"\xdd\xff\xff\xff\xff" + b"\x01" * 1000,
    "2**32 - 1 pairs": b"\x92\xdf\xff\xff\xff\xff" + b"\xa1a\x01" * 1000,
    "2**32 - 1 bytes": b"\x92\xc6\xff\xff\xff\xff\x01",
    "lists in lists": b"\x91" * 100_000,
    "an extension": b"\x92\xc7\x03\x01abc\x01",
    "a fixed extension": b"\x92\xd4\x01a\x01",
    "the byte that means nothing": b"\x92\xc1\x01",
    "a number as a name": packed([{1: 2}, 1]),
    "a complex number": packed([{b"complex": True, b"data": "1j"}, 1]),
}


@pytest.mark.parametrize("data", MSGPACK_BOMBS.values(), ids=MSGPACK_BOMBS)
def test_a_msgpack_that_would_fill_memory_or_is_more_than_plain_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"it |its "):
        datapoint_of(data)


def test_a_list_of_keys_that_would_run_a_command_is_only_searched_for_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "file", {key_of(0): RECORD}, NEWEST([RunsACommand(), key_of(0)]))

    converted(tmp_path / "file", tmp_path / "out")

    assert not (tmp_path / "was-run").exists()


def test_digits_without_end_are_no_key_and_take_no_memory() -> None:
    value = ByteWindow.of(b"[" + b"1" * (1 << 20))
    with memory_below(1 << 18), pytest.raises(ValueError, match="not a number of at least 8 digits"):
        datapoint.read_keys(value)


@given(keys=st.lists(st.integers(0, 10**18 - 1), max_size=3000), name=st.sampled_from(sorted(SERIALIZERS)))
@settings(deadline=None, max_examples=30)
def test_a_list_of_keys_has_the_numbers_that_were_put_in(keys: list[int], name: str) -> None:
    assert datapoint.read_keys(ByteWindow.of(SERIALIZERS[name](list(map(key_of, keys))))).tolist() == keys


numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans() | st.none()
arrays = st.builds(
    lambda shape, dtype: np.arange(np.prod(shape)).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.sampled_from(["u1", "i1", "<i2", "<f2", "<f8", "<c16", "?"]),
)
leaves = numbers | st.binary(max_size=300) | st.text(max_size=300) | arrays


def parts_of(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(parts, max_size=5) | st.dictionaries(st.sampled_from("abc"), parts, max_size=3)


items = leaves | parts_of(leaves | parts_of(leaves))


@given(item=st.lists(items, min_size=1), name=st.sampled_from(sorted(SERIALIZERS)))
@example(item=["refrigerator"] * 20, name="pickle 5")
@settings(deadline=None)
def test_plain_data_come_back_from_any_serializer(item: list[Any], name: str) -> None:
    assert are_same(read_item(ByteWindow.of(SERIALIZERS[name](item))), item)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_large_numbers_tuples_and_arrays_of_any_byte_and_axis_order_come_back(protocol: int) -> None:
    array = np.arange(24, dtype=">f8").reshape(2, 3, 4)
    arrays = [array, array.T, array.transpose(1, 2, 0), array[:, ::2]]

    found = read_item(ByteWindow.of(pickle.dumps([2**63, (1, (2,)), *arrays], protocol)))

    assert found[:2] == [2**63, (1, (2,))]
    assert are_same(found[2:], [each.astype("<f8") for each in arrays])


def assert_read(data: bytes, image: bytes, label: int) -> None:
    found, found_label = datapoint_of(data)
    assert (read_bytes(ByteWindow.of(data), found), found_label) == (image, label)


@pytest.mark.parametrize("how", IN_A_DATAPOINT)
@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_an_image_and_its_label_are_read_in_every_form(serializer: str, how: str) -> None:
    assert_read(SERIALIZERS[serializer](IN_A_DATAPOINT[how](JPEG, 300)), JPEG, 300)


@pytest.mark.parametrize("written", WRITTEN_ELSEWHERE.values(), ids=WRITTEN_ELSEWHERE)
def test_what_other_versions_wrote_is_read(written: str) -> None:
    assert_read(base64.b64decode(written), PNG, 7)


def test_no_name_is_imported_or_called() -> None:
    program = (
        "import sys\n"
        "from shardprep.formats.sources import pickled\n"
        "known = set(sys.modules)\n"
        "from shardprep.formats.sources.record_files import ByteWindow\n"
        "for name in pickled.GLOBALS:\n"
        "    module, _, word = name.rpartition('.')\n"
        "    data = b'\\x80\\x02c' + f'{module}\\n{word}\\n'.encode() + b'.'\n"
        "    assert type(pickled.unpickle(ByteWindow.of(data))) is pickled.GlobalName\n"
        "assert set(sys.modules) == known\n"
        "assert not {'pickle', '_pickle'} & {m for m in known if 'shardprep' in m}\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_another_program_wrote_and_nothing_are_wrong_usage(lmdb_shards: Path, tmp_path: Path) -> None:
    caffe = save(tmp_path / "caffe", {b"00000000_n01440764/a.JPEG": b"datum"}, None)

    for path in (caffe, lmdb_shards / "shard-00000.lmdb"):
        with pytest.raises(UsageError, match="not from tensorpack's LMDBSerializer: its first key is b'"):
            recognise(path)
    with pytest.raises(UsageError, match="without records"):
        recognise(save(tmp_path / "file", {}, None))


def test_a_file_of_other_metadata_or_cut_off_is_an_error(tmp_path: Path) -> None:
    path = save_images(tmp_path / "file")
    data = bytearray(path.read_bytes())
    for page in (0, 4096):
        struct.pack_into("<Q", data, page + 120, 99)

    for damaged, said in ((data, "says that it has 99"), (data[: len(data) // 2], "the LMDB is damaged")):
        path.write_bytes(damaged)
        with pytest.raises(SourceDamaged, match=said):
            recognise(path).listing("train")


def test_records_that_share_their_bytes_would_make_much_of_little(tmp_path: Path) -> None:
    """All records are in the pages of the first one."""
    images = [JPEG + bytes(500_000), *[JPEG + bytes(5_000)] * 20]
    path = save_datapoints(tmp_path / "file", [[image, 0] for image in images])
    data = bytearray(path.read_bytes())
    nodes = list(re.finditer(rb"(....)\x01\0\x08\x00000000(\d\d)(........)", bytes(data), re.DOTALL))
    length, _, page = next(node for node in nodes if node[2] == b"00").groups()
    for node in nodes:
        data[node.start(1) : node.end(1)], data[node.start(3) : node.end(3)] = length, page
    path.write_bytes(data)

    with pytest.raises(SourceDamaged, match="share their bytes"):
        recognise(path).listing("train")


FILES: dict[str, list[Any]] = {
    "arrays": [[np.full((n, 4), n, np.float32), np.arange(6).reshape(2, 3), n / 7] for n in range(5)],
    "several images": [[JPEG, JPEG + bytes(n), "text", n] for n in range(5)],
    "decoded image": [[np.full((4, 4, 3), n, np.uint8), n] for n in range(5)],
    "dicts": [{"image": JPEG, "label": n, "boxes": np.zeros((n, 4)), "name": f"n{n}"} for n in range(5)],
    "numpy's numbers": [[np.int16(n), np.float64(n)] for n in range(5)],
}


@pytest.mark.parametrize("serializer", ["pickle 2", "pickle 4", "pickle 5", "msgpack"])
@pytest.mark.parametrize("name", FILES)
def test_datapoints_come_out_as_they_were_put_in(serializer: str, name: str, tmp_path: Path) -> None:
    if serializer == "pickle 2" and name == "several images":
        pytest.skip("protocol 2 stores bytes as text")
    source = save_datapoints(tmp_path / "data.lmdb", FILES[name], SERIALIZERS[serializer])

    convert(source, tmp_path / "out", split="train", plan_options=PlanOptions(order="key"), workers=0)

    found = list(Flow.from_dataset(tmp_path / "out"))
    assert all(are_same(one, other) for one, other in zip(found, FILES[name], strict=True))
    assert verify(tmp_path / "out").findings == []


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[1.5, 2], [1.5]], "is a list of 1, expected a list of 2"),
        ([[1.5, 2], {"a": 1}], "is a dict of a, expected a list of 2"),
        ([{"key": "a", "v": 1.5}], "a component named key"),
        ([[[1.5], np.zeros(2, "c16")], [[1.5], np.zeros(2, "i4")]], "make no columns"),
        ([{"label": -7, "v": 1.5}], "the label -7"),
        ([3], "not a list or dict of components"),
        ([{"größe": 1}], "not text of at most 128 ASCII characters"),
    ],
)
def test_what_is_not_like_the_first_or_no_column_is_refused(
    points: list[Any], message: str, tmp_path: Path
) -> None:
    source = save_datapoints(tmp_path / "data.lmdb", points)
    with pytest.raises(SourceDamaged, match=message):
        convert(source, tmp_path / "out", split="train", workers=0)


def test_bytes_that_are_there_many_times_are_bounded() -> None:
    value = ByteWindow.of(NEWEST([block := bytes(1 << 16), *[block] * 900]))
    with pytest.raises(ValueError, match="more bytes than the whole record"):
        read_item(value)
