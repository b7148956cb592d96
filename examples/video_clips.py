"""Video: decode shards of clips, and cut long videos into clips: ``python examples/video_clips.py``.

Two programs in one: `split` reads shards of whole videos and writes shards of clips of a fixed number of frames
(offline, once); `frames` reads such shards as tensors for training. Needs ``pip install "wds-async[torch,media]"``.
"""

import io
import tempfile
from collections.abc import Iterator

import av
import numpy as np

import wds_async as wds

FRAMES, SIDE, RATE = 8, 64, 24


def encode(frames: np.ndarray) -> bytes:
    """An mp4 of frames (T, H, W, 3) in uint8."""
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        track = container.add_stream(
            "mpeg4", rate=RATE, width=frames.shape[2], height=frames.shape[1], pix_fmt="yuv420p"
        )
        for frame in frames:
            container.mux(track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(track.encode())
    return stream.getvalue()


def make_videos(url: str, videos: int = 3, frames: int = 50) -> None:
    """A shard of videos in which a bright square moves."""
    with wds.TarWriter(url, mtime=0) as sink:
        for number in range(videos):
            pictures = np.zeros((frames, SIDE, SIDE, 3), np.uint8)
            for t in range(frames):
                left = (t + 10 * number) % (SIDE - 16)
                pictures[t, 24:40, left : left + 16] = 255
            sink.write({"__key__": f"video{number}", "mp4": encode(pictures), "json": {"label": number}})


def clips(sample: dict) -> Iterator[dict]:
    """The clips of one video; a rest shorter than a clip is left out."""
    video, _, info = sample["mp4"]  # frames (T, H, W, 3), sound, and a dict with video_fps
    for number in range(len(video) // FRAMES):
        clip = video[number * FRAMES : (number + 1) * FRAMES].numpy()
        yield {
            "__key__": f"{sample['__key__']}-{number:03d}",
            "mp4": encode(clip),
            "json": {**sample["json"], "second": number * FRAMES / info["video_fps"]},
        }


def split(source: str, pattern: str) -> int:
    """Read shards of videos, write shards of clips; the number of clips."""
    with wds.ShardWriter(pattern, maxcount=8, verbose=0, mtime=0) as sink:
        for sample in wds.WebDataset(source, shardshuffle=False).decode(wds.torch_video):
            for clip in clips(sample):
                sink.write(clip)
        return sink.total


def frames(url: str) -> Iterator:
    """Batches of clips (B, T, 3, H, W) in [0, 1] and labels (B,); decoding in two threads keeps the order."""

    def prepared(sample: dict) -> tuple:
        video = sample["mp4"][0].permute(0, 3, 1, 2).float() / 255
        return video, sample["json"]["label"]

    dataset = wds.WebDataset(url, shardshuffle=100, seed=0).shuffle(16, seed=0)
    return iter(dataset.decode(wds.torch_video, threads=2).map(prepared).batched(4))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_videos(f"{folder}/videos.tar")
        count = split(f"{folder}/videos.tar", f"{folder}/clips-%06d.tar")
        print(f"{count} clips of {FRAMES} frames")
        for batch, labels in frames(f"{folder}/clips-{{000000..{(count - 1) // 8:06d}}}.tar"):
            print(tuple(batch.shape), labels)
