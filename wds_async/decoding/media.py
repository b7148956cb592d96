"""Video and sound fields to tensors: the decoder handlers `torch_video` and `torch_audio`.

PyAV (FFmpeg) and soundfile (libsndfile) give tensors of the same shapes and types as torchvision and torchaudio, which
torch has stopped developing, and from memory; they are preferred.
"""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wds_async.errors import MissingExtra

__all__ = ["package", "torch_audio", "torch_video"]

_VIDEO = frozenset(("avi", "h264", "mjpeg", "mov", "mp4", "mpg", "ogv", "webm", "wmv"))
_AUDIO = frozenset(("flac", "m4a", "mp3", "ogg", "sox", "wav", "wma"))

Reader = Callable[[bytes, str], Any]


def torch_video(key: str, data: bytes) -> Any:
    """Return ``(frames, sound, info)`` of a video (avi h264 mjpeg mov mp4 mpg ogv webm wmv), None for other fields.

    As torchvision's ``read_video``: ``frames`` is uint8, (frames, height, width, 3), in RGB; ``sound`` is float32,
    (channels, values), mostly in [-1, 1], of shape (1, 0) where there is none; ``info`` holds ``video_fps`` (float,
    frames a second) and ``audio_fps`` (int, values a second) of what is there. All of it is in memory at once: an hour
    of 1080p is 600 GB, so cut long films into clips.

    Read by the first of PyAV, torchcodec and torchvision that is installed. Raises `MissingExtra` where none is,
    and that library's errors for data that is no video.
    """
    extension = key.rpartition(".")[2].lower()
    return _reader("video")(data, extension) if extension in _VIDEO else None


def torch_audio(key: str, data: bytes) -> Any:
    """Return ``(sound, rate)`` of sound (flac m4a mp3 ogg sox wav wma), None for other fields.

    As torchaudio's ``load``: ``sound`` is float32, (channels, values), in [-1, 1] for whole-number formats; ``rate`` is
    the number of values a second (int).

    Read by the first of soundfile, PyAV, torchcodec and torchaudio that is installed; what soundfile does not know
    (m4a, wma) goes to PyAV. Raises `MissingExtra` where none is, and that library's errors for data that is no sound.
    """
    extension = key.rpartition(".")[2].lower()
    return _reader("sound")(data, extension) if extension in _AUDIO else None


def package(name: str) -> Any:
    """Import a package; None where it is not installed or does not load (torchcodec without FFmpeg: RuntimeError)."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


@functools.cache  # an import that fails is looked for anew in every folder, and there may be one for each sample
def _reader(kind: str) -> Reader:
    if package("torch") is None:
        raise MissingExtra(f'decoding {kind} gives torch tensors: pip install "wds-async[torch,media]"')
    for name, function, reader in _READERS[kind]:
        if hasattr(package(name), function):
            return reader
    names = ", ".join(name.partition(".")[0] for name, _, _ in _READERS[kind])
    raise MissingExtra(f'decoding {kind} needs one of {names}: pip install "wds-async[media]"')


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    return package("torch").from_numpy(array)


# ------------------------------------------------------------------ PyAV


def _open(data: bytes) -> Any:
    # FFmpeg knows playlists by content, whatever the field is called, and would open the files and URLs they name.
    return package("av").open(io.BytesIO(data), options={"protocol_whitelist": "none"}, metadata_errors="ignore")


def _video_by_av(data: bytes, extension: str) -> Any:
    av = package("av")
    with _open(data) as container:
        pictures, sounds = container.streams.video[:1], container.streams.audio[:1]
        resample, frames, chunks = _resampler(), [], []
        for frame in container.decode([*pictures, *sounds]):
            if isinstance(frame, av.VideoFrame):
                frames.append(frame.to_ndarray(format="rgb24"))
            else:
                chunks.extend(resample(frame))
        chunks.extend(resample(None) if chunks else [])
        info = {"video_fps": float(stream.average_rate or stream.guessed_rate or 0) for stream in pictures}  # noqa: B035
        info |= {"audio_fps": stream.rate for stream in sounds}  # noqa: B035 (at most one)
    video = np.stack(frames) if frames else np.empty((0, 1, 1, 3), np.uint8)
    return _tensor(video), _tensor(_joined(chunks)), info


def _audio_by_av(data: bytes, extension: str) -> Any:
    with _open(data) as container:
        stream = container.streams.audio[0]
        resample = _resampler()
        frames = itertools.chain(container.decode(stream), [None])  # None makes the resampler give what it holds
        return _tensor(_joined([chunk for frame in frames for chunk in resample(frame)])), stream.rate


def _resampler() -> Callable[[Any], list[Any]]:
    """Return a function from frames of any format to float32 arrays, (channels, values), at their own rate."""
    resampler = package("av").AudioResampler(format="fltp")
    return lambda frame: [chunk.to_ndarray() for chunk in resampler.resample(frame)]


def _joined(chunks: list[Any]) -> Any:
    return np.concatenate(chunks, axis=1) if chunks else np.empty((1, 0), np.float32)


# ------------------------------------------------------------------ soundfile, torchvision, torchaudio, torchcodec


def _audio_by_soundfile(data: bytes, extension: str) -> Any:
    soundfile = package("soundfile")
    try:
        values, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError:
        if package("av") is None:
            raise
        return _audio_by_av(data, extension)
    return _tensor(np.ascontiguousarray(values.T)), rate


def _video_by_torchvision(data: bytes, extension: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:  # it reads files only
        path = Path(folder, f"field.{extension}")
        path.write_bytes(data)
        return package("torchvision.io").read_video(str(path), pts_unit="sec")


def _video_by_torchcodec(data: bytes, extension: str) -> Any:
    decoders, torch = package("torchcodec.decoders"), package("torch")
    video = decoders.VideoDecoder(data, dimension_order="NHWC")
    info = {"video_fps": float(video.metadata.average_fps)}
    try:
        sound, rate = _audio_by_torchcodec(data, extension)
    except ValueError:  # no stream of sound
        return video[:], torch.empty((1, 0)), info
    return video[:], sound, {**info, "audio_fps": rate}


def _audio_by_torchcodec(data: bytes, extension: str) -> Any:
    samples = package("torchcodec.decoders").AudioDecoder(data).get_all_samples()
    return samples.data, samples.sample_rate


_READERS: dict[str, tuple[tuple[str, str, Reader], ...]] = {
    "video": (
        ("av", "open", _video_by_av),
        ("torchcodec.decoders", "VideoDecoder", _video_by_torchcodec),
        ("torchvision.io", "read_video", _video_by_torchvision),
    ),
    "sound": (
        ("soundfile", "read", _audio_by_soundfile),
        ("av", "open", _audio_by_av),
        ("torchcodec.decoders", "AudioDecoder", _audio_by_torchcodec),
        ("torchaudio", "load", lambda data, _: package("torchaudio").load(io.BytesIO(data))),
    ),
}
"""Package, what it must have (new versions of torchvision read no video) and the reader, by preference."""
