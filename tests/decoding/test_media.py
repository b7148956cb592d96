"""wds_async.decoding.media: real videos and sounds, encoded here by FFmpeg (PyAV) and libsndfile (soundfile)."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch

from wds_async.autodecode import Decoder
from wds_async.decoding import media
from wds_async.decoding.media import torch_audio, torch_video
from wds_async.errors import DecodingError, MissingExtra

RATE = 16_000
FRAMES = 25


@pytest.fixture(autouse=True)
def look_anew() -> Iterator[None]:
    """The packages that are there change from test to test here."""
    media._reader.cache_clear()
    yield
    media._reader.cache_clear()


def wave(channels: int = 2, seconds: float = 1.0) -> Any:
    t = np.arange(int(RATE * seconds), dtype=np.float32) / RATE
    return np.stack([0.5 * np.sin(2 * np.pi * 220 * (n + 1) * t) for n in range(channels)])


def colour(n: int) -> tuple[int, int, int]:
    return n * 10, 128, 255 - n * 10


def video(codec: str = "mpeg4", form: str = "mp4", sound: str | None = "aac") -> bytes:
    """25 frames of one colour each, 64 x 48, a second long, with two tones."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        pictures = container.add_stream(codec, rate=FRAMES)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        voice = container.add_stream(sound, rate=RATE, layout="stereo") if sound else None
        for n in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), colour(n), np.uint8), format="rgb24")
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode())
        if voice is not None:
            tones = av.AudioFrame.from_ndarray(wave(), format="fltp", layout="stereo")
            tones.rate = RATE
            container.mux(voice.encode(tones))
            container.mux(voice.encode())
    return out.getvalue()


def sound(form: str, channels: int = 2, subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, wave(channels).T, RATE, format=form, subtype=subtype)
    return out.getvalue()


def pitch(values: Any) -> float:
    """The strongest frequency, in Hz."""
    spectrum = np.abs(np.fft.rfft(np.asarray(values)))
    return float(np.fft.rfftfreq(len(values), 1 / RATE)[spectrum.argmax()])


# ---------------------------------------------------------------- video


@pytest.mark.parametrize(("extension", "form", "voice"), [("mp4", "mp4", "aac"), ("avi", "avi", "mp3")])
def test_a_video(extension: str, form: str, voice: str) -> None:
    frames, tones, info = torch_video(f".clip.{extension}", video(form=form, sound=voice))
    assert (frames.dtype, tuple(frames.shape)) == (torch.uint8, (FRAMES, 48, 64, 3))
    for n in range(FRAMES):
        means = frames[n].float().mean((0, 1))
        assert (means - torch.tensor(colour(n), dtype=torch.float32)).abs().max() < 16
    assert tones.dtype == torch.float32
    assert tones.shape[0] == 2
    assert RATE <= tones.shape[1] <= 1.1 * RATE  # codecs of sound fill up their last frame
    assert [round(pitch(channel[:RATE]), -1) for channel in tones] == [220, 440]
    assert info == {"video_fps": 25.0, "audio_fps": RATE}
    frames += 1  # writable


def test_a_video_without_sound() -> None:
    frames, tones, info = torch_video(".mp4", video(sound=None))
    assert len(frames) == FRAMES
    assert (tones.dtype, tuple(tones.shape)) == (torch.float32, (1, 0))
    assert info == {"video_fps": 25.0}


def test_sound_in_a_file_for_videos() -> None:
    frames, tones, info = torch_video(".ogv", sound("OGG"))
    assert (frames.dtype, tuple(frames.shape)) == (torch.uint8, (0, 1, 1, 3))
    assert tones.shape[0] == 2
    assert info == {"audio_fps": RATE}


def test_a_playlist_opens_no_file(tmp_path: Any) -> None:
    secret = tmp_path / "secret.ts"
    secret.write_bytes(video(form="mpegts", sound="mp2"))
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{secret}\n#EXT-X-ENDLIST\n"
    for playlist in (hls, f"ffconcat version 1.0\nfile {secret}\n"):
        with pytest.raises(av.FFmpegError):
            torch_video(".mp4", playlist.encode())
    assert len(torch_video(".mpg", secret.read_bytes())[0]) == FRAMES


# ---------------------------------------------------------------- sound


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("extension", ["flac", "wav"])
def test_sound_without_loss(extension: str, channels: int) -> None:
    tones, rate = torch_audio(f".a.{extension}", sound(extension.upper(), channels))
    assert (tones.dtype, tuple(tones.shape), rate) == (torch.float32, (channels, RATE), RATE)
    assert tones.is_contiguous()
    assert np.abs(tones.numpy() - wave(channels)).max() < 1e-4  # 16 bits


@pytest.mark.parametrize("form", ["MP3", "OGG"])
def test_sound_with_loss(form: str) -> None:
    if form not in soundfile.available_formats():
        pytest.skip(f"this libsndfile has no {form}")
    tones, rate = torch_audio(f".{form.lower()}", sound(form))
    assert (tones.dtype, tones.shape[0], rate) == (torch.float32, 2, RATE)
    assert RATE <= tones.shape[1] <= 1.1 * RATE
    assert [round(pitch(channel[:RATE]), -1) for channel in tones] == [220, 440]


def test_pyav_gives_the_same_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sound("FLAC")
    expected = torch_audio(".flac", data)
    media._reader.cache_clear()
    monkeypatch.setitem(sys.modules, "soundfile", None)
    found = torch_audio(".flac", data)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_what_soundfile_does_not_know_goes_to_pyav() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        voice = container.add_stream("aac", rate=RATE, layout="mono")
        tone = av.AudioFrame.from_ndarray(wave(1), format="fltp", layout="mono")
        tone.rate = RATE
        container.mux(voice.encode(tone))
        container.mux(voice.encode())
    tones, rate = torch_audio(".m4a", out.getvalue())
    assert (tones.shape[0], rate, round(pitch(tones[0, :RATE]), -1)) == (1, RATE, 220)


# ---------------------------------------------------------------- as handlers


def test_other_fields_are_left_alone() -> None:
    assert torch_video(".flac", b"x") is None
    assert torch_audio(".mp4", b"x") is None
    sample = Decoder([torch_video, torch_audio])({"__key__": "k", "flac": sound("FLAC"), "mp4": video(), "cls": b"3"})
    assert sample["flac"][0].shape == (2, RATE)
    assert sample["mp4"][0].shape[0] == FRAMES
    assert sample["cls"] == 3


def test_damaged_fields_name_their_sample() -> None:
    for field in ("mp4", "flac"):
        with pytest.raises(DecodingError, match=f"field '{field}'.*sample 'k'.*Invalid data"):
            Decoder([torch_video, torch_audio])({"__key__": "k", field: b"junk" * 100})


@pytest.mark.parametrize(("handler", "extension"), [(torch_video, "mp4"), (torch_audio, "ogg")])
def test_the_extra_is_named_where_no_package_is_there(
    handler: Any, extension: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("av", "soundfile", "torchcodec", "torchcodec.decoders", "torchvision", "torchaudio"):
        monkeypatch.setitem(sys.modules, package, None)
    assert handler(".txt", b"x") is None
    with pytest.raises(MissingExtra, match=r'av.*torchcodec.*pip install "wds-async\[media\]"'):
        handler(f".{extension}", b"x")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r'torch tensors.*pip install "wds-async\[torch,media\]"'):
        handler(f".{extension}", b"x")
