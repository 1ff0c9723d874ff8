"""Audio decoded to samples: the same ones for any number of workers, in threads and in processes,
and no clip that is shorter than its file says."""

from __future__ import annotations

import dataclasses
import io
import sys
import tarfile
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, open_evaluation
from elastic_dp.data.pipeline.audio_decoding import clips
from elastic_dp.errors import DataError, SpecError, UserCodeError

ROWS, V, B, RATE = 24, 4, 2, 16000
LOSSY = [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]
EXACT = [("WAV", "PCM_16"), ("WAVEX", "PCM_24"), ("FLAC", "PCM_16")]


def samples(i: int, count: int = 40, channels: int = 1) -> Any:
    """int16 [count, channels], with both ends of their range."""
    made = np.random.default_rng(i).integers(-(1 << 15), 1 << 15, (count, channels), dtype=np.int16)
    made[:2, 0] = -(1 << 15), (1 << 15) - 1
    return made


def wav(array: Any, rate: int = RATE) -> bytes:
    """A WAV file by the standard library."""
    with wave.open(out := io.BytesIO(), "wb") as file:
        file.setnchannels(array.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(array.astype("<i2").tobytes())
    return out.getvalue()


def encoded(array: Any, kind: str, coding: str, rate: int = RATE) -> bytes:
    soundfile.write(out := io.BytesIO(), array, rate, format=kind, subtype=coding)
    return out.getvalue()


def expected(array: Any) -> Any:
    """float32 [samples], or [channels, samples]."""
    found = array.T.astype(np.float32) / (1 << 15)
    return found[0] if len(found) == 1 else found


def decoded(content: bytes, rate: int | None = None) -> Any:
    found, _ = clips("clip", [content], rate)
    return found[0]


def audio(folder: Path, contents: list[bytes | None], **changes: Any) -> DataConfig:
    made = pa.table({"id": range(len(contents)), "clip": pa.array(contents, pa.binary())})
    pq.write_table(made, folder / "a.parquet", row_group_size=5)
    options: dict[str, Any] = {"decode": {"clip": "audio"}, "micro_batch_size": B}
    return DataConfig(str(folder), **options | changes)


def dealt(config: DataConfig, workers: int) -> list[tuple[int, torch.Tensor, int]]:
    data = [open_data(config, virtual_workers=V) for _ in range(workers)]
    for number, one in enumerate(data):
        one.read_ahead(1, range(number, V, workers))
    found = []
    for step in range(1, data[0].steps_per_epoch + 1):
        for v in range(V):
            batch = data[v % workers].batch(step, v)
            rates = batch.get("clip_rate", [0] * B)
            found += zip(batch["id"].tolist(), batch["clip"], map(int, rates), strict=True)
    for one in data:
        one.close()
    return found


def first_batch(config: DataConfig) -> Any:
    data = open_data(config, virtual_workers=1)
    try:
        return data.batch(1, 0)
    finally:
        data.close()


# ---------------------------------------------------------------------------------- the same bits


def test_clips_are_the_samples_that_were_written_for_one_worker_and_for_three(tmp_path):
    config = audio(tmp_path, [wav(samples(i), RATE + i) for i in range(ROWS)], epochs=1)
    alone, three = dealt(config, 1), dealt(config, 3)
    assert [i for i, *_ in alone] == [i for i, *_ in three]
    assert sorted(i for i, *_ in alone) == list(range(ROWS))
    for i, clip, rate in alone + three:
        assert clip.dtype == torch.float32 and rate == RATE + i
        assert np.array_equal(clip, expected(samples(i)))
        assert clip.min() == -1 and clip.max() < 1
    data = open_evaluation(config)
    batch = data.batch(0)
    data.close()
    assert np.array_equal(batch["clip"], [expected(samples(0)), expected(samples(1))])
    assert batch["clip_rate"].dtype == torch.int64


@pytest.mark.parametrize("rate", [None, 8000])
def test_clips_of_all_formats_are_equal_for_one_worker_and_for_three(rate, tmp_path):
    kinds = LOSSY + EXACT
    files = [encoded(samples(i, 2000), *kinds[i % len(kinds)]) for i in range(ROWS)]
    config = audio(tmp_path, files, epochs=1, collate_fn=as_list)
    if rate is not None:
        config = dataclasses.replace(config, decode={"clip": {"audio": rate}})
    alone, three = dealt(config, 1), dealt(config, 3)
    for (i, one, _), (j, other, _) in zip(alone, three, strict=True):
        assert i == j and torch.equal(one, other)
        assert np.array_equal(one, decoded(files[i], rate))


def test_clips_decoded_in_a_process_are_those_decoded_in_threads(tmp_path):
    kinds = LOSSY + EXACT
    files = [encoded(samples(i, 2000), *kinds[i % len(kinds)]) for i in range(ROWS)]
    config = audio(tmp_path, files, epochs=1, collate_fn=as_list)
    config = dataclasses.replace(config, decode={"clip": {"audio": 8000}})
    here, there = dealt(config, 1), dealt(dataclasses.replace(config, workers=1), 1)
    for (i, one, _), (j, other, _) in zip(here, there, strict=True):
        assert i == j and torch.equal(one, other)


def as_list(batch: dict[str, Any]) -> dict[str, Any]:
    made = {name: torch.from_numpy(batch[name]) for name in batch if name != "clip"}
    return made | {"clip": [torch.from_numpy(clip.copy()) for clip in batch["clip"]]}


@pytest.mark.parametrize(("kind", "coding"), LOSSY)
def test_lossy_clips_have_equal_bits_in_many_threads_at_once(kind, coding):
    content = encoded(samples(1, 3000, 2), kind, coding)
    alone = decoded(content, 22050)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: decoded(content, 22050), range(24)):
            assert np.array_equal(found, alone)


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize(("kind", "coding"), EXACT)
def test_lossless_clips_are_what_was_written(kind, coding, channels):
    array = samples(3, 500, channels)
    found = decoded(encoded(array, kind, coding))
    assert found.dtype == np.float32 and found.flags.c_contiguous
    assert np.array_equal(found, expected(array))


# ----------------------------------------------------------------------------- shapes and rates


def test_clips_of_one_length_are_one_array_and_others_a_list(tmp_path):
    seen: dict[int, Any] = {}

    def look(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
        seen[int(batch["id"][0])] = batch["clip"]
        return {"id": batch["id"]}

    shapes = [(40, 2), (40, 2), (40, 1), (30, 1), (40, 1), (40, 2)]
    files = [wav(samples(i, *shape)) for i, shape in enumerate(shapes)]
    config = audio(tmp_path, files, shuffle="none", transform=look)
    data = open_evaluation(config)
    for number in range(3):
        data.batch(number)
    data.close()
    stereo, lengths, channels = seen[0], seen[2], seen[4]
    assert stereo.shape == (2, 2, 40)
    assert [clip.shape for clip in lengths] == [(40,), (30,)] and type(lengths) is list
    assert [clip.shape for clip in channels] == [(40,), (2, 40)]


def test_clips_of_different_lengths_reach_transform_and_collate_fn(tmp_path):
    files = [wav(samples(i, 40 + i)) for i in range(4)]

    def cut(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"clip": np.stack([clip[:40] for clip in batch["clip"]])}

    def pad(batch: dict[str, Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(c) for c in batch["clip"]])

    config = audio(tmp_path, files, shuffle="none")
    assert first_batch(dataclasses.replace(config, transform=cut))["clip"].shape == (2, 40)
    assert first_batch(dataclasses.replace(config, collate_fn=pad)).shape == (41, 2)
    with pytest.raises(DataError, match=r"'clip' holds clips of different .*\[40\], \[41\].*pad"):
        first_batch(config)


def test_clips_are_resampled_to_the_rate_that_is_set(tmp_path):
    time = np.arange(4800) / 48000
    tone = np.sin(2 * np.pi * 440 * time)[:, None]
    files = [wav((tone * 20000).astype(np.int16), 48000), wav(samples(0, 1600))]
    config = audio(tmp_path, files, shuffle="none", decode={"clip": {"audio": RATE}})
    batch = first_batch(config)
    assert [*batch] == ["id", "clip"]
    assert batch["clip"].shape == (2, 1600) and batch["clip"].dtype == torch.float32
    assert np.array_equal(batch["clip"][1], expected(samples(0, 1600)))  # has this rate already
    wanted = np.sin(2 * np.pi * 440 * np.arange(1600) / RATE) * 20000 / (1 << 15)
    middle = slice(100, -100)
    assert np.abs(batch["clip"][0].numpy() - wanted)[middle].max() < 1e-4


def test_clip_without_samples_is_an_empty_array():
    assert decoded(wav(samples(0)[:0])).shape == (0,)
    assert decoded(wav(samples(0)[:0]), 8000).shape == (0,)


def test_samples_of_other_widths_are_their_integers_divided_by_the_largest():
    for width, content, values in (
        (1, bytes([0, 128, 255]), [-1, 0, 127 / 128]),
        (3, bytes([0, 0, 128, 1, 0, 0, 255, 255, 127]), [-1, 1 / (1 << 23), 1 - 1 / (1 << 23)]),
    ):
        with wave.open(out := io.BytesIO(), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(width)
            file.setframerate(RATE)
            file.writeframes(content)
        assert decoded(out.getvalue()).tolist() == values
    beyond = np.array([[2.5], [-3.0]], np.float32)
    assert decoded(encoded(beyond, "WAV", "FLOAT")).tolist() == [2.5, -3.0]


# --------------------------------------------------------------------------------- kinds of columns


def test_audio_of_hugging_face_datasets_is_decoded_by_its_bytes(tmp_path):
    """`datasets.Audio` is stored as struct<bytes: binary, path: string>."""
    structs = [{"bytes": wav(samples(i)), "path": f"{i}.wav"} for i in range(4)]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    pq.write_table(pa.table({"audio": pa.array(structs, kind)}), tmp_path / "a.parquet")
    config = DataConfig(
        str(tmp_path), decode={"audio.bytes": "audio"}, shuffle="none", micro_batch_size=4
    )
    batch = first_batch(config)
    assert np.array_equal(batch["audio.bytes"], [expected(samples(i)) for i in range(4)])
    assert batch["audio.bytes_rate"].tolist() == [RATE] * 4
    assert batch["audio.path"] == [f"{i}.wav" for i in range(4)]
    no_bytes = pa.array([{"bytes": None, "path": "0.wav"}] * 4, kind)
    pq.write_table(pa.table({"audio": no_bytes}), tmp_path / "a.parquet")
    with pytest.raises(UserCodeError, match=r"'audio\.bytes', clip 1 of 4 is null"):
        first_batch(config)


@pytest.mark.parametrize(
    ("ending", "kind", "coding"), [("wav", *EXACT[0]), ("flac", *EXACT[2]), ("mp3", *LOSSY[2])]
)
def test_audio_members_of_webdataset_tar_are_decoded(ending, kind, coding, tmp_path):
    files = [encoded(samples(i, 2000), kind, coding) for i in range(4)]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for i, content in enumerate(files):
            member = tarfile.TarInfo(f"{i:04}.{ending}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    config = DataConfig(str(tmp_path), decode={ending: "audio"}, shuffle="none", micro_batch_size=4)
    batch = first_batch(config)
    assert np.array_equal(batch[ending], [decoded(content) for content in files])
    assert batch[f"{ending}_rate"].tolist() == [RATE] * 4


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("bad", "message", "changes"),
    [
        (b"no audio", "cannot be decoded: Format not recognised", {}),
        (b"no audio", "cannot be decoded: Format not recognised", {"workers": 1}),
        (b"no audio", "cannot be decoded: Format not recognised", {"on_bad_shard": "skip"}),
        (wav(samples(0))[:-2], "was cut off: it holds 78 of 80 bytes of samples", {}),
        (None, "is null", {}),
    ],
)
def test_clip_that_cannot_be_decoded_is_named_by_its_row(bad, message, changes, tmp_path):
    config = audio(tmp_path, [wav(samples(0)), bad] * 4, shuffle="none", **changes)
    named = rf"DataConfig\.decode .*'clip', clip 2 of 2 {message}.*rows 0, 1 of a\."
    with pytest.raises(UserCodeError, match=named):
        first_batch(config)


@pytest.mark.parametrize(("kind", "coding"), LOSSY + EXACT)
def test_clip_that_was_cut_off_anywhere_is_refused(kind, coding):
    content = encoded(samples(2, 2000), kind, coding)
    for length in {*range(0, len(content), len(content) // 50), len(content) - 1}:
        with pytest.raises(ValueError, match=r"clip 1 of 1 (was cut off|is damaged|cannot be)"):
            decoded(content[:length])


@pytest.mark.parametrize(("kind", "coding"), [EXACT[2], LOSSY[0], LOSSY[1]])
def test_changed_bytes_in_a_format_with_checksums_are_refused(kind, coding):
    content = bytearray(encoded(samples(2, 60000), kind, coding))
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    with pytest.raises(ValueError, match=r"clip 1 of 1 (is damaged|cannot be)"):
        decoded(bytes(content))


@pytest.mark.parametrize("coding", ["VORBIS", "OPUS"])
def test_ogg_streams_that_were_joined_are_refused(coding):
    """libsndfile reads the first one, and says nothing of the second."""
    one = encoded(samples(1, 4_000), "OGG", coding)
    with pytest.raises(ValueError, match=rf"is several Ogg streams, joined at byte {len(one):,};"):
        decoded(one + one)


def test_wav_that_was_written_to_a_pipe_is_read():
    content = bytearray(wav(samples(0)))
    content[40:44] = content[4:8] = b"\xff" * 4  # its writer could not go back to set the lengths
    assert np.array_equal(decoded(bytes(content)), expected(samples(0)))


def test_flac_without_its_length_is_refused():
    content = bytearray(encoded(samples(0), *EXACT[2]))
    content[21] &= 0xF0
    content[22:26] = bytes(4)  # the number of samples
    with pytest.raises(ValueError, match="does not say how many samples"):
        decoded(bytes(content))


def test_format_whose_end_is_not_checked_is_refused_by_name():
    with pytest.raises(ValueError, match="is AIFF; WAV, FLAC, Ogg and MP3 are decoded"):
        decoded(encoded(samples(0), "AIFF", "PCM_16"))


def test_columns_that_hold_no_audio_are_refused_when_data_is_opened(tmp_path):
    config = audio(tmp_path, [wav(samples(0))] * 8)
    for name, message in (("id", "'id' is int64, and must hold the bytes of audio"), ("x", "no")):
        with pytest.raises(DataError, match=rf"DataConfig\.decode: .*{message}"):
            open_data(dataclasses.replace(config, decode={name: "audio"}), virtual_workers=1)
    made = pa.table({"clip": [b"x"] * 8, "clip_rate": range(8)})
    pq.write_table(made, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'clip_rate' of the sampling rates, and the shards have"):
        open_data(config, virtual_workers=1)


@pytest.mark.parametrize(
    "kind", ["wav", {"audio": 0}, {"audio": "16k"}, {"rate": 1}, {}, ["audio"]]
)
def test_unknown_kinds_of_decoding_are_refused(kind):
    with pytest.raises(SpecError, match=r'DataConfig\.decode is .*"audio": 16000'):
        DataConfig("/data", decode={"clip": kind}, micro_batch_size=1)


@pytest.mark.parametrize(("missing", "kind"), [("soundfile", "audio"), ("soxr", {"audio": 8000})])
def test_missing_library_is_named_with_the_extra_that_has_it(missing, kind, tmp_path, monkeypatch):
    config = audio(tmp_path, [wav(samples(0))] * 8, decode={"clip": kind})
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(DataError, match=rf"needs {missing}.*pip install 'elastic_dp\[audio\]'"):
        open_data(config, virtual_workers=1)
