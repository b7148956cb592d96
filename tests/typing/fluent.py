"""Types as an editor sees them: checked by mypy and pyright, never run (`make types`)."""

from collections.abc import Iterator
from typing import Any, assert_type

import wds_async as wds
from wds_async import distributed

dataset = wds.WebDataset("train-{000..009}.tar", shardshuffle="epoch", seed=1)
assert_type(dataset.shuffle(1000), wds.WebDataset)
assert_type(dataset.shuffle(1000).decode("torchrgb").to_tuple("jpg", "cls").batched(16), wds.WebDataset)
assert_type(dataset.map_dict(jpg=len).select(bool).slice(3).with_epoch(10), wds.WebDataset)
assert_type(dataset.state_dict(), dict[str, Any])

loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
assert_type(loader.unbatched().shuffle(100).batched(8).with_epoch(5), wds.WebLoader)
assert_type(loader.decode_batch("jpg", device="cuda"), wds.WebLoader)
assert_type(iter(wds.NumpyLoader(dataset, 16)), Iterator[Any])
assert_type(wds.DataPipeline(wds.SimpleShardList("x.tar"), wds.split_by_worker), wds.DataPipeline)
assert_type(len(wds.IndexedDataset("x.tar")), int)

with wds.ShardWriter("out-%06d.tar", maxcount=10) as sink:
    assert_type(sink, wds.ShardWriter)
    sink.write({"__key__": "a", "txt": "b"})

assert_type(distributed.map_shards("in.tar", "out-{task}.tar", "module:function"), distributed.Job)
